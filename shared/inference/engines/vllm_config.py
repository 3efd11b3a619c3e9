"""How a vLLM engine is built."""

from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VllmEngineConfig:
    """How one engine is built. Devices are chosen by the launcher (`CUDA_VISIBLE_DEVICES`)."""

    model: str
    """Hugging Face folder. Only its configuration is read; weights come from GPS."""
    kv_cache_memory_bytes: int
    """KV cache of each rank. Explicit: no memory profiling runs while another engine shares the device."""
    max_model_len: int
    """Prompt and generated tokens of one sequence."""
    max_num_seqs: int = 64
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    seed: int = 0
    cpu_cores: str = ""
    """Cores the CPU engine binds to, such as "3" or "0-3"; empty leaves the choice to vLLM."""
    enforce_eager: bool = False
    """No CUDA graphs. Always on for CPU, where compiling costs more than it brings to small models."""

    def __post_init__(self) -> None:
        for field in ("kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "tensor_parallel_size"):
            if getattr(self, field) <= 0:
                raise ConfigError(field, getattr(self, field), "must be positive", "Give a number above 0.")
        if self.device == "cpu" and self.tensor_parallel_size > 1:
            raise ConfigError(
                "tensor_parallel_size", self.tensor_parallel_size, "is 1 where device = cpu", "Set it to 1."
            )
