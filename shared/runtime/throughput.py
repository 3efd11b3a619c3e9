"""Which throughput model a run starts from: constants profiled beforehand, by model size and device kind."""

from shared.ids import Role
from shared.runtime.config import RunConfig
from shared.scheduling.throughput import CPU_SMOLLM2_135M, H200_7B_TP1, ThroughputModel


def throughput_model(config: RunConfig, role: Role) -> ThroughputModel:
    """The model for `role`. On CPU: SmolLM2-135M on one core. On GPUs: a dense 7B on one H200, the
    measured set nearest to what most runs use. Absolute scale matters less than shape: candidates are
    compared with one another."""
    return CPU_SMOLLM2_135M if config.cluster.kind == "cpu" else H200_7B_TP1
