"""Pin mapped host memory in a GPU process, so that copies to the device run at the speed of the bus."""

from shared.errors import TransportError

_CUDA_HOST_REGISTER_DEFAULT = 0


def pin(address: int, nbytes: int, what: str) -> None:
    """Register the bytes with CUDA: 6 to 13 GB/s, so once per mapping. They must be mapped writable.

    Raises TransportError naming `what`.
    """
    import torch

    code = torch.cuda.cudart().cudaHostRegister(address, nbytes, _CUDA_HOST_REGISTER_DEFAULT)
    if int(code) != 0:
        raise TransportError(f"cannot pin {what} ({nbytes} bytes): CUDA error {int(code)}", path=what)


def unpin(address: int) -> None:
    """Undo `pin`, before the pages are unmapped."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
