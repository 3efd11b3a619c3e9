"""What a replica worker needs: an inference engine to run sequences, and a source to read weights from.

Both are declared here, at their consumer (`replica.py`); neither knows the bus. An engine is synchronous and
is only ever called from one thread, so an implementation needs no lock.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from shared.contracts.gps import PoolView, ReadGrant, TensorBox
from shared.contracts.replica import SequenceSpec, TokenDelta

SequenceKey = tuple[str, int]
"""`(sequence_id, attempt)`."""

NO_VERSION = -1
"""The policy version of an engine that holds no whole version: asleep, or in the middle of a Read."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """What an engine carries right now.

    `lengths` are resident tokens (prompt and generated) of each running sequence, in order of submission;
    `resident_bytes` is process memory on CPU and device memory in use on GPU.
    """

    num_running: int
    lengths: tuple[int, ...]
    kv_capacity_tokens: int
    step_latency_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a Read copied into the engine's parameters, and how long the copying took."""

    read_bytes: int
    read_s: float


class Engine(Protocol):
    """An inference engine that can give its memory back and take it again (paper §5.2).

    Every method is synchronous, and the caller uses one thread for all of them. The caller need not know how
    the engine lays its parameters out, nor how it batches.

    Errors: `EngineError` where the engine refused or died, `LayoutError` where a checkpoint cannot be mapped
    on its parameters by pure copies.
    """

    @property
    def policy_version(self) -> int:
        """The version of the weights it holds, `NO_VERSION` when it holds none or a torn one."""

    def start(self) -> None:
        """Bring the engine up, without weights. It is asleep afterwards."""

    def close(self) -> None:
        """Release everything. Idempotent."""

    def submit(self, spec: SequenceSpec) -> None:
        """Start or resume one sequence: generation continues after `spec.generated_token_ids`.

        Raises `InvalidRequest` for one that can never run here, such as a prompt beyond the context length.
        """

    def abort(self, keys: Sequence[SequenceKey]) -> list[TokenDelta]:
        """Stop sequences. One delta for each key it ran, with the tokens no `step` has returned (or none).

        A key it does not run is left out of the answer.
        """

    def step(self) -> list[TokenDelta]:
        """One engine iteration: at most one delta per sequence, with the tokens since the last step.

        Each token comes with its log probability under the distribution it was drawn from (temperature and
        top-p applied) and with the policy version that made it. A finished sequence carries a finish reason
        and is forgotten.
        """

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def sleep(self) -> int:
        """Give weights and KV back and return the bytes freed, measured. No sequence may be running.

        Legal in any state after `start`, also half way through a failed `wake`: it leaves the engine asleep.
        """

    def wake(self, view: PoolView, version: int) -> ReadReport:
        """Allocate weights and KV and fill the weights from `view`, which holds `version`."""

    def refresh(self, view: PoolView, version: int) -> ReadReport:
        """Read other weights in place. Running sequences go on; tokens drawn afterwards carry `version`."""

    def load_snapshot(self) -> LoadSnapshot:
        """Cheap enough for every step."""

    def layout(self) -> tuple[TensorBox, ...]:
        """The parts of the checkpoint it reads; empty while unknown, which a Read takes as all of it."""


class WeightSource(Protocol):
    """Where a replica reads its model from: GPS, over a lease (paper §5.1)."""

    def read(self, min_version: int) -> AbstractAsyncContextManager[ReadGrant]:
        """Lease a version that is at least `min_version`. The buffer may be reused once the context ends."""
