"""The engines, and the one place that chooses between them. Importing this loads neither torch nor vLLM."""

from collections.abc import Callable

from shared.inference.engines.simulated_engine import SimulatedEngine, SimulatedEngineConfig
from shared.inference.engines.vllm_config import VllmEngineConfig
from shared.inference.engines.vllm_engine import VllmEngine
from shared.inference.ports import Engine

__all__ = ["SimulatedEngineConfig", "VllmEngineConfig", "create_engine"]


def create_engine(
    config: VllmEngineConfig | SimulatedEngineConfig,
    latency: Callable[[int, int], float] = lambda n, tokens: 0.01,
) -> Engine:
    """The engine `config` describes, not yet started.

    `latency(n, tokens)`, seconds of one decode step, is for the simulated one.
    """
    if isinstance(config, VllmEngineConfig):
        return VllmEngine(config)
    return SimulatedEngine(latency, config)
