"""What runs inside each vLLM worker: Read into live parameters, and on CPU a sleep that really frees.

`PivotWorkerExtension` is mixed into vLLM's own `Worker` (`worker_extension_cls`); the engine calls methods of
both by way of `pivot_call`, with plain values, which also cross to the workers of tensor parallelism.

On GPU vLLM's allocator unmaps and remaps the parameters under unchanged addresses, and a Read is one pinned
copy from the mapped pool into each of them. On CPU vLLM packs a linear layer's weight after loading and drops
the original, so a Read goes module by module: an unpacked fused parameter, the copies, the layer's own
`process_weights_after_loading` again. That also keeps a tied `lm_head` from serving stale packed weights.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shared.contracts.gps import PoolTensor, PoolView, SlicedTensors, TensorBox
from shared.errors import LayoutError
from shared.inference.engines.process_memory import resident_bytes, trim_heap
from shared.inference.engines.vllm_model import build_model
from shared.inference.engines.worker_answers import Answer, answer_of
from shared.weights.loader_map import LoaderMap
from shared.weights.pool_reader import PoolReader
from shared.weights.sliced_tensor import SlicedTensor

WireTensor = tuple[str, str, tuple[int, ...], int]
"""A `PoolTensor` as plain values: name, dtype, shape, offset in bytes."""

WireSlices = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""A `SlicedTensors` as plain values: names, starts, shapes."""


class _Weights:
    """The live model of one worker together with the map that fills it."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.is_cpu = vllm_config.device_config.device_type == "cpu"
        self.map: LoaderMap | None = None
        self.pools = PoolReader(folder=None, is_pinning=not self.is_cpu)
        self._wire: Sequence[WireTensor] = ()
        self._tensors: tuple[PoolTensor, ...] = ()

    def tensors(self, wire: Sequence[WireTensor]) -> tuple[PoolTensor, ...]:
        """`wire` as messages; those of the last call are kept, since a checkpoint rarely changes."""
        if wire != self._wire:
            self._tensors = tuple(
                PoolTensor(name=name, dtype=dtype, shape=tuple(shape), offset_bytes=offset)
                for name, dtype, shape, offset in wire
            )
            self._wire = wire
        return self._tensors

    def ensure_map(self, wire: Sequence[WireTensor]) -> LoaderMap:
        """The loader map for this checkpoint, recorded at first use."""
        sources = self.tensors(wire)
        if self.map is None or not self.map.fits(sources):
            recorded = LoaderMap.record(build_model(self.vllm_config, "meta"), sources)
            self._check_live(recorded)
            self.map = recorded
        return self.map

    def _check_live(self, recorded: LoaderMap) -> None:
        """The live model must share the memory the recorded one shares, and on GPU have the same shapes."""
        live = dict(self.model.named_parameters(remove_duplicate=False))
        for name, spec in recorded.parameters.items():
            if name not in live or any(live.get(alias) is not live[name] for alias in spec.aliases):
                raise LayoutError(f"parameter {name}: the live model lacks it or unties it", parameter=name)
        if len({id(live[name]) for name in recorded.parameters}) != len(recorded.parameters):
            raise LayoutError(
                "the engine tied its embeddings although the checkpoint has an lm_head of its own; "
                "set tie_word_embeddings to false in config.json, or drop lm_head from the checkpoint"
            )
        if self.is_cpu:
            return
        for name, module in self.model.named_modules():
            if not any(True for _ in module.named_parameters(recurse=False)):
                continue
            method = getattr(module, "quant_method", None)
            if not _keeps_loaded_form(method):
                raise LayoutError(
                    f"module {name}: {type(method).__name__} may rearrange weights after loading, "
                    "so that a Read cannot fill them",
                    parameter=name,
                )

    def read(self, path: str, nbytes: int, wire: Sequence[WireTensor], sliced: Sequence[WireSlices]) -> int:
        loader_map = self.ensure_map(wire)
        cut = tuple(SlicedTensors(tensors=names, starts=a, shapes=n) for names, a, n in sliced)
        pool = self.pools.map(PoolView(path=path, nbytes=nbytes, tensors=self.tensors(wire), sliced=cut))
        if self.is_cpu:
            return self._read_and_repack(loader_map, pool.tensors)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        device = next(iter(parameters.values())).device
        copied = loader_map.apply(
            pool.tensors, parameters, stage=lambda host: host.to(device, non_blocking=True)
        )
        torch.cuda.synchronize(device)
        return copied

    def _read_and_repack(
        self, loader_map: LoaderMap, sources: Mapping[str, torch.Tensor | SlicedTensor]
    ) -> int:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        self.restore_storage()
        copied = 0
        for prefix, module in self.model.named_modules():
            for local, live in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{local}" if prefix else local
                spec = loader_map.parameters.get(name)
                if spec is None:  # another name of tied memory
                    continue
                if tuple(live.shape) != spec.shape:  # packed and dropped
                    fresh = torch.empty(spec.shape, dtype=spec.dtype)
                    live = torch.nn.Parameter(fresh, requires_grad=False)
                    module.register_parameter(local, live)
                copied += loader_map.apply(sources, {name: live}, only=(name,))
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                if getattr(method, "moe_kernel", None) is not None:
                    # with a kernel at hand vLLM takes this for an update of packed weights: packs nothing
                    method.moe_kernel = None
                method.process_weights_after_loading(module)
        return copied

    def restore_storage(self) -> None:
        """Give parameters whose memory was dropped room again."""
        for parameter in self.model.parameters():
            nbytes = parameter.numel() * parameter.element_size()
            if parameter.untyped_storage().nbytes() < nbytes:
                parameter.untyped_storage().resize_(nbytes)

    def drop_storage(self) -> None:
        for module in self.model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(0)


def _keeps_loaded_form(method: Any) -> bool:
    """Whether a layer's weights on GPU stay as loaded: then copies into the live parameter suffice."""
    name = type(method).__name__
    if name == "UnquantizedFusedMoEMethod":
        return getattr(getattr(method, "unquantized_backend", None), "name", "") == "TRITON"
    return name in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class PivotWorkerExtension:
    """Mixed into vLLM's `Worker`; every name starts with `pivot_` because vLLM refuses a clash."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any

    def pivot_call(self, method: str, args: Sequence[Any]) -> Answer:
        """Run a method of this worker, one below or vLLM's own. The only one to call collectively: it raises
        nothing, which would leave the ranks out of step."""
        return answer_of(lambda: getattr(self, method)(*args))

    def _pivot_weights(self) -> _Weights:
        if not hasattr(self, "pivot_weights"):
            self.pivot_weights = _Weights(self.model_runner.get_model(), self.vllm_config)
        return self.pivot_weights

    def pivot_boxes(self, tensors: Sequence[WireTensor]) -> list[dict[str, Any]]:
        """Record the map for a checkpoint and return what this rank reads of it."""
        boxes: tuple[TensorBox, ...] = self._pivot_weights().ensure_map(tensors).boxes()
        return [box.model_dump() for box in boxes]

    def pivot_read(
        self, path: str, nbytes: int, tensors: Sequence[WireTensor], sliced: Sequence[WireSlices] = ()
    ) -> tuple[int, float]:
        """Fill the live parameters from the pool file; `(bytes read, seconds)`."""
        begin = time.perf_counter()
        copied = self._pivot_weights().read(path, nbytes, tensors, sliced)
        return copied, time.perf_counter() - begin

    def pivot_sleep_cpu(self) -> tuple[int, int]:
        """Drop weights and KV memory; resident bytes before and after. Idempotent."""
        before = resident_bytes()
        self._pivot_weights().drop_storage()
        for cache in self._pivot_caches():
            cache.untyped_storage().resize_(0)
        trim_heap()
        return before, resident_bytes()

    def pivot_wake_kv_cpu(self) -> None:
        """Give the KV caches their memory back, zeroed. All layers may lie in one storage: it grows once,
        since each growth copies what is there."""
        needed: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for cache in self._pivot_caches():
            storage = cache.untyped_storage()
            span = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
            nbytes = (cache.storage_offset() + span + 1) * cache.element_size()
            most = max(nbytes, needed.get(storage._cdata, (storage, 0))[1])
            needed[storage._cdata] = (storage, most)
        for storage, nbytes in needed.values():
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)
        for cache in self._pivot_caches():
            cache.zero_()

    def pivot_unmap(self) -> None:
        """Give back what a failed wake has mapped on a GPU. Idempotent.

        Buffers that the wake has restored already are saved again first, as vLLM's own sleep does.
        """
        from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

        torch.cuda.synchronize()
        worker: Any = self
        if not worker._sleep_saved_buffers:
            buffers = worker.model_runner.model.named_buffers()
            worker._sleep_saved_buffers = {name: buffer.cpu().clone() for name, buffer in buffers}
        for allocation in CuMemAllocator.get_instance().pointer_to_data.values():
            if not allocation.is_asleep:
                unmap_and_release(allocation.handle)
                allocation.is_asleep = True
        gc.collect()
        torch.cuda.empty_cache()

    def pivot_resident(self) -> int:
        """Memory in use: of the device, or of this process on CPU."""
        if self._pivot_weights().is_cpu:
            return resident_bytes()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def _pivot_caches(self) -> list[torch.Tensor]:
        caches: list[torch.Tensor] = []
        for cache in self.model_runner.kv_caches:
            caches.extend(cache if isinstance(cache, list | tuple) else [cache])
        return caches
