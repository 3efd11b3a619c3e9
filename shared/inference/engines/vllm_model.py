"""Another copy of an engine's model, to record its loader or to compare with."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shared.errors import LayoutError


class _IndicesOnHost(TorchFunctionMode):  # type: ignore[misc]
    """Integer tables are made on the host wherever the model is: under expert parallelism the loader asks one
    which expert is whose, and a tensor on the meta device has no values to answer with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.full, torch.arange) and kwargs.get("dtype") in (torch.int32, torch.int64):
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


def build_model(vllm_config: Any, device: str) -> torch.nn.Module:
    """Another copy of the engine's model, as this rank builds it and before any weight is loaded.

    On the meta device it has shapes and loaders without memory. It gets a configuration of its own where the
    live model has registered its layers, and is never compiled.

    Raises LayoutError if the model computes with values while it is built on the meta device.
    """
    from vllm.config import CompilationMode
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.mode = CompilationMode.NONE
    if hasattr(config.compilation_config, "static_all_moe_layers"):
        config.compilation_config.static_all_moe_layers = []
    before = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        has_expert_tables = vllm_config.parallel_config.enable_expert_parallel
        with torch.device(device), _IndicesOnHost() if has_expert_tables else contextlib.nullcontext():
            model: torch.nn.Module = initialize_model(vllm_config=config)
    except NotImplementedError as error:
        if device != "meta":
            raise
        architectures = ", ".join(vllm_config.model_config.architectures)
        raise LayoutError(
            f"{architectures} cannot be built without memory, so that a Read cannot be recorded: {error}"
        ) from error
    finally:
        torch.set_default_dtype(before)
    return model
