"""Cost models of the language models in the scenarios: throughput constants, memory, shift and training
times.

Constants of a decode step (`shared.scheduling.throughput`) come from three places, named per model below:

- published fits on 96 GB H20-class devices: 7B TP1 (3.35e-8, 6.4e-3, 1.231e-4, 2.8e-3), 14B TP1, 30B-A3B TP1;
- our own decode steps on one H200, 11 points each of a dense 7B and a 30B-A3B (8 of 128 experts), which
  give the
  expert term: 57 GB of expert weights in 1.36e-2 s is 0.87 of the memory bandwidth;
- a roofline on model shape and device, whose four efficiencies reproduce those fits:
      A = KV bytes per token / (0.43 · bandwidth)      7B: 3.33e-8 (fit 3.35e-8); 14B: 1.14e-7 (fit 1.165e-7)
      B = dense weight bytes / (0.60 · bandwidth)      7B: 6.3e-3 (fit 6.4e-3); 14B: 1.23e-2 (fit 1.23e-2)
      C = 2 · active parameters / (0.83 · FLOP/s)      7B: 1.24e-4 (fit 1.231e-4); 14B: 2.4e-4 (fit 2.441e-4)
      E = expert weight bytes / (0.87 · bandwidth)     30B-A3B on one H200: 1.37e-2 (fit 1.36e-2)
  MoE kernels compute less well: C at 0.36, from the published 30B-A3B fit (1.249e-4). All are divided by
  the tensor parallel width; D grows by two all-reduces a layer of 36 µs each, from the published 7B TP2 fit
  (B + D = 8.0e-3 where halving alone would give 6.0e-3).
"""

from dataclasses import dataclass
from math import inf

from shared.scheduling.throughput import ThroughputModel
from shared.sim.cluster import EngineModel

_ATTENTION, _WEIGHTS, _COMPUTE, _EXPERTS, _MOE_COMPUTE = 0.43, 0.60, 0.83, 0.87, 0.36
_FIXED_S, _MOE_FIXED_S, _ALL_REDUCE_S = 2.8e-3, 3.39e-3, 36e-6
_PREFILL = 0.5
"""Of the peak FLOP/s, for whole prompts in bf16."""
_MEMORY_FOR_KV = 0.88
"""Of the device memory, weights included; the rest is preserved context (at most 3.4 GB), activations,
graphs."""
_TRAINING_MFU = 0.40
_TRAINING_FLOPS_PER_PARAMETER = 6.0
"""Per token, forward and backward; the behaviour log-probabilities come with the samples."""
_STATE_BYTES_PER_PARAMETER = 16.0
"""fp32 masters, two Adam moments and gradients, offloaded and reloaded at each training shift."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    read_bytes_per_s: float
    """GPS Read and Write per device, many small tensors included."""
    offload_bytes_per_s: float
    wake_s: float
    """Shift-up apart from the Read: pages, KV cache, graphs."""
    sleep_s: float


H20 = Device("H20", 148e12, 4.0e12, 96e9, 9e9, 10e9, 0.8, 1.0)
"""Read at 9 GB/s a device (NIXL in public use: 8.25) with 0.8 s to wake gives shift-ups of 1.1 s for 1.5B
and 2.5 s for 7B; the paper's Figure 12 has about 1 s and 2 to 3 s. Down takes under 2 s there."""

H200 = Device("H200", 989e12, 4.8e12, 141e9, 42e9, 36e9, 0.1, 0.05)
"""Our measurements: 7B wakes in 0.40 to 0.47 s of which 0.34 to 0.38 s is the Read (40 to 45 GB/s), sleeps
in 0.05 s; ZeRO-3 offload of 24 GiB takes 0.66 to 0.81 s."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """The shape of a model, from its public configuration."""

    name: str
    parameters: float
    active_parameters: float
    num_layers: int
    kv_bytes_per_token: float
    expert_parameters: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    kv_heads: int = 8
    """Above this width the KV cache is repeated."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def weight_bytes(self) -> float:
        return 2.0 * self.parameters

    def throughput(self, device: Device, tp: int) -> ThroughputModel:
        """Constants of a decode step by the roofline of the module docstring."""
        kv_share = self.kv_bytes_per_token / min(tp, self.kv_heads)
        dense_bytes = 2.0 * (self.parameters - self.expert_parameters)
        compute = _MOE_COMPUTE if self.is_moe else _COMPUTE
        communication_s = 2 * self.num_layers * _ALL_REDUCE_S if tp > 1 else 0.0
        return ThroughputModel(
            attention_s_per_token=kv_share / (_ATTENTION * device.bytes_per_s),
            weights_s=dense_bytes / tp / (_WEIGHTS * device.bytes_per_s),
            compute_s_per_sequence=2.0 * self.active_parameters / tp / (compute * device.flops),
            fixed_s=(_MOE_FIXED_S if self.is_moe else _FIXED_S) + communication_s,
            experts_s=2.0 * self.expert_parameters / tp / (_EXPERTS * device.bytes_per_s),
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )

    def engine(self, device: Device, tp: int, mean_length: float) -> EngineModel:
        """A replica on `tp` devices; `mean_length` resident tokens decide the best batch that fits."""
        throughput = self.throughput(device, tp)
        kv_bytes = self.kv_bytes_per_token / min(tp, self.kv_heads) * tp
        capacity = int((_MEMORY_FOR_KV * device.memory_bytes * tp - self.weight_bytes) / kv_bytes)
        return EngineModel(
            throughput=throughput,
            prefill_s_per_token=2.0 * self.active_parameters / (tp * _PREFILL * device.flops),
            kv_capacity_tokens=capacity,
            num_devices=tp,
            best_overhead_s=best_overhead_s(throughput, max(1, int(capacity / max(1.0, mean_length)))),
        )

    def read_s(self, device: Device, tp: int) -> float:
        """GPS Read into one replica; MoE tensors are many and repacked, at half the speed (Figure 13: 3 to
        4 s)."""
        return self.weight_bytes / tp / device.read_bytes_per_s * (2.0 if self.is_moe else 1.0)

    def training_s(self, device: Device, num_devices: int, num_tokens: float) -> float:
        """One step over `num_tokens`."""
        flops = _TRAINING_FLOPS_PER_PARAMETER * self.active_parameters * num_tokens
        return flops / (_TRAINING_MFU * device.flops * num_devices)

    def training_offload_s(self, device: Device, num_devices: int) -> float:
        return _STATE_BYTES_PER_PARAMETER * self.parameters / num_devices / device.offload_bytes_per_s


def best_overhead_s(model: ThroughputModel, max_sequences: int) -> float:
    """min over n of overhead(n) / n."""
    best = inf
    n = 1
    while n <= max_sequences:
        best = min(best, model.overhead_s(n) / n)
        n = max(n + 1, n * 21 // 20)
    return min(best, model.overhead_s(max_sequences) / max_sequences)


QWEN25_1_5B = LanguageModel("Qwen2.5-1.5B", 1.54e9, 1.54e9, 28, 28 * 2 * 2 * 128 * 2, kv_heads=2)
QWEN25_7B = LanguageModel("Qwen2.5-7B", 7.62e9, 7.62e9, 28, 28 * 2 * 4 * 128 * 2, kv_heads=4)
QWEN25_32B = LanguageModel("Qwen2.5-32B", 32.8e9, 32.8e9, 64, 64 * 2 * 8 * 128 * 2)
QWEN25_72B = LanguageModel("Qwen2.5-72B", 72.7e9, 72.7e9, 80, 80 * 2 * 8 * 128 * 2)
GLM_Z1_9B = LanguageModel("GLM-Z1-9B", 9.4e9, 9.4e9, 40, 40 * 2 * 2 * 128 * 2, kv_heads=2)
QWEN3_30B_A3B = LanguageModel(
    "Qwen3-30B-A3B", 30.5e9, 3.3e9, 48, 48 * 2 * 4 * 128 * 2, 28.6e9, 128, 8, kv_heads=4
)
QWEN35_122B_A10B = LanguageModel(
    "Qwen3.5-122B-A10B", 122e9, 10e9, 48, 12 * 2 * 2 * 256 * 2, 115e9, 256, 9, kv_heads=2
)
"""One layer in four has full attention and so a growing cache; 8 routed experts and a shared one of 256."""
