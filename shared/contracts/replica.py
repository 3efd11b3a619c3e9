"""Replica worker ↔ its role service: commands, token deltas, telemetry."""

from typing import Literal

from shared.contracts.base import Message
from shared.ids import Role

ReplicaState = Literal["starting", "asleep", "waking", "awake"]
FinishReason = Literal["stop", "length"]


class SamplingSpec(Message):
    """How one sequence is sampled. `max_new_tokens` counts all generated tokens, resumed ones included."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class SequenceSpec(Message):
    """role service → replica. Generation resumes after `generated_token_ids`; none of them is generated
    again."""

    sequence_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...] = ()
    sampling: SamplingSpec


class RunSequences(Message):
    """role service → replica: start or resume generation."""

    sequences: tuple[SequenceSpec, ...]

    def summary(self) -> str:
        return f"run {len(self.sequences)} sequences"


class TokenDelta(Message):
    """Tokens `start .. start + len(token_ids)` of one sequence, counted from its first generated token.

    `versions` is a run-length list `(policy version, count)` over the same tokens.
    """

    sequence_id: str
    attempt: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason | None = None
    error: str | None = None


class SequenceProgress(Message):
    """replica → role service: a batch of token deltas."""

    replica_id: str
    incarnation: str
    deltas: tuple[TokenDelta, ...]

    def summary(self) -> str:
        tokens = sum(len(d.token_ids) for d in self.deltas)
        finished = sum(d.finish_reason is not None for d in self.deltas)
        return f"{self.replica_id}: {tokens} tokens of {len(self.deltas)} sequences, {finished} finished"


class AbortSequences(Message):
    """role service → replica: stop these `(sequence, attempt)`; None means every one."""

    sequences: tuple[tuple[str, int], ...] | None

    def summary(self) -> str:
        return "abort all" if self.sequences is None else f"abort {len(self.sequences)} sequences"


class SequencesAborted(Message):
    """replica → role service: each stopped sequence with the tokens not yet sent (may be none).

    `unknown` names those the replica does not run (they finished, or never arrived).
    """

    deltas: tuple[TokenDelta, ...]
    unknown: tuple[tuple[str, int], ...] = ()

    def summary(self) -> str:
        return f"aborted {len(self.deltas)} sequences"


class SleepReplica(Message):
    """role service → replica: release weights and KV; refused while sequences run."""


class ReplicaSlept(Message):
    """replica → role service. `freed_bytes` is measured, not assumed (resident memory or device memory)."""

    freed_bytes: int
    resident_bytes: int
    duration_s: float

    def summary(self) -> str:
        return f"asleep, freed {self.freed_bytes / 2**20:.0f} MiB in {self.duration_s:.2f} s"


class WakeReplica(Message):
    """role service → replica: allocate weights and KV, Read the parameters from GPS.

    `min_version` is the oldest version the caller will serve with.
    """

    min_version: int = 0


class ReplicaWoke(Message):
    """replica → role service: the version it proved to hold, and its KV room."""

    version: int
    kv_capacity_tokens: int
    read_bytes: int
    read_s: float
    duration_s: float

    def summary(self) -> str:
        return (
            f"awake at version {self.version}, read {self.read_bytes / 2**20:.0f} MiB in {self.read_s:.2f} s"
        )


class RefreshReplica(Message):
    """role service → replica: Read at least `min_version` in place, with running requests kept."""

    min_version: int


class ReplicaRefreshed(Message):
    """replica → role service."""

    version: int
    read_bytes: int
    duration_s: float

    def summary(self) -> str:
        return f"refreshed to version {self.version} in {self.duration_s:.2f} s"


class ReplicaTelemetry(Message):
    """replica → monitor and its role service, 4 Hz: also the heartbeat.

    `incarnation` changes with every process start; `lengths` are resident tokens of each running sequence.
    """

    replica_id: str
    role: Role
    incarnation: str
    pid: int
    state: ReplicaState
    devices: tuple[int, ...]
    num_running: int
    lengths: tuple[int, ...]
    kv_capacity_tokens: int
    tokens_per_s: float
    step_latency_s: float
    generated_tokens_total: int
    policy_version: int
    resident_bytes: int

    def summary(self) -> str:
        return (
            f"{self.replica_id} {self.state}: {self.num_running} running, "
            f"{sum(self.lengths)} tokens resident, {self.tokens_per_s:.0f} tok/s, v{self.policy_version}"
        )
