"""What a rank needs of its training engine. The rank shell calls from one thread only, one call at a time.

Every call is collective: all ranks make the same calls in the same order, but for `shard_boxes` and
`copy_shard`, which touch this rank's memory only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.contracts.gps import TensorBox
from shared.contracts.rank import TrainSample
from shared.weights.host_pool import MappedPool


@dataclass(frozen=True, slots=True)
class StepStats:
    """Of this rank's samples in this call, but for `grad_norm` (of the whole gradient, before clipping; 0
    where no step was taken)."""

    loss_sum: float
    grad_norm: float
    tokens: int
    response_tokens: int
    logprob_gap_sum: float
    logprob_gap_max: float
    importance_ratio_max: float
    clipped_tokens: int


class TrainBackend(Protocol):
    """States are on the device after `build`, `load` and `reload`; after `offload` they are in host
    memory."""

    @property
    def is_built(self) -> bool: ...

    @property
    def is_offloaded(self) -> bool: ...

    @property
    def step(self) -> int:
        """Policy version of the parameters."""

    @property
    def tag(self) -> str | None:
        """The checkpoint that the states are equal to ("" as built), or None after a step."""

    def build(self, pool: MappedPool) -> None:
        """A fresh model with this rank's shard copied out of `pool`, and an optimizer without history.

        Raises:
            LayoutError: the model's parameters are not the pool's tensors.
        """

    def load(self, tag: str) -> None:
        """Parameters, optimizer and random state as saved under `tag`.

        Raises:
            NotFound: there is no such checkpoint.
        """

    def save(self, tag: str) -> None:
        """Everything `load` needs; on disk when it returns."""

    def train(
        self,
        step: int,
        samples: Sequence[TrainSample],
        total_response_tokens: int | None,
        num_micro_batches: int,
    ) -> StepStats:
        """Gradients of `samples`, added to those of earlier calls for `step`, in `num_micro_batches` passes
        whatever the number of samples. Then, unless `total_response_tokens` is None, one optimizer step from
        version `step` to the next. `load` and `build` drop gradients of a step that was not ended."""

    def offload(self) -> int:
        """Optimizer state, fp32 masters, parameters and, within a step, gradients off the device; the bytes
        that were moved or, as gradients between steps, dropped."""

    def reload(self) -> int:
        """Back to the device; the bytes that were moved."""

    def shard_boxes(self) -> tuple[TensorBox, ...]:
        """The flat ranges of checkpoint tensors that this rank holds; all ranks' together are the model."""

    def copy_shard(self, pool: MappedPool) -> tuple[str, ...]:
        """Copies this rank's ranges into `pool`; their checksums, in the order of `shard_boxes`."""

    def close(self) -> None:
        """Leaves the process group. Only between calls."""
