"""One process that believes to be any rank of an engine: building and loading a model ask the parallel groups
for rank and size, and nothing else."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any


def config_of(model: str, dtype: str = "float32") -> Any:
    """vLLM's configuration of an engine for the Hugging Face folder `model`; its `config.json` is enough."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype=dtype)
    return arguments.create_engine_config()


def make_groups(config: Any) -> None:
    """vLLM's parallel groups, each of one; that of experts is made for a model with experts only."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)


@contextlib.contextmanager
def as_rank(config: Any, rank: int, size: int, *, has_experts: bool = False) -> Iterator[None]:
    """Inside, this process is `rank` of `size` devices of tensor (and expert) parallelism."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    groups = [parallel_state.get_tp_group()]
    if has_experts:
        groups.append(parallel_state.get_ep_group())
    with set_current_vllm_config(config):
        for group in groups:
            group.rank_in_group, group.world_size = rank, size
        try:
            yield
        finally:
            for group in groups:
                group.rank_in_group, group.world_size = 0, 1
