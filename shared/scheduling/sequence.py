"""The words of a role's scheduler: places, events, effects, and the load of a role.

    WAITING ──RunSequence──► RUNNING ──AbortSequence──► ABORTING ──SequenceAborted──► WAITING
                                └── SequenceFinished ──────┴──► FINISHED
    any of them ── SequenceFailed, or cancelled ──► FAILED

An attempt is one stay on a replica; it goes up whenever a sequence leaves one unfinished. A report that
carries any other attempt is about a stay that is over.
"""

from dataclasses import dataclass
from enum import StrEnum

from shared.ids import ReplicaId, SequenceId


class Phase(StrEnum):
    """Where a sequence is. RUNNING and ABORTING are on a replica, the others are not."""

    WAITING = "waiting"
    RUNNING = "running"
    ABORTING = "aborting"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Place:
    """The one place a sequence is in; `replica` is set exactly when `phase` is on a replica."""

    phase: Phase
    replica: ReplicaId | None = None

    def __post_init__(self) -> None:
        assert (self.replica is not None) == (self.phase in (Phase.RUNNING, Phase.ABORTING)), self


WAITING, FINISHED, FAILED = Place(Phase.WAITING), Place(Phase.FINISHED), Place(Phase.FAILED)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One generation, in tokens. `prompt_tokens` + `generated_tokens` are resident when it runs."""

    id: SequenceId
    prompt_tokens: int
    generated_tokens: int
    max_new_tokens: int
    attempt: int = 0
    place: Place = WAITING
    is_cancelled: bool = False
    """Fails instead of going back to the queue once its abort is confirmed."""

    @property
    def length(self) -> int:
        """Tokens resident in the KV cache."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens it may still generate."""
        return max(0, self.max_new_tokens - self.generated_tokens)

    def kv_need(self, growth_margin_tokens: int) -> int:
        """KV tokens to set aside for it: what it holds, and room to grow for a while."""
        return self.length + min(growth_margin_tokens, self.remaining_tokens)


# Events: what happened. `num_tokens_total` counts all tokens generated so far, those of earlier attempts
# included.


@dataclass(frozen=True, slots=True)
class SequenceSubmitted:
    """A new sequence; `generated_tokens` > 0 continues a partial one. A known id does nothing."""

    sequence: SequenceId
    prompt_tokens: int
    max_new_tokens: int
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """Progress on a replica."""

    sequence: SequenceId
    replica: ReplicaId
    attempt: int
    num_tokens_total: int


@dataclass(frozen=True, slots=True)
class ReplicaProgressed:
    """Progress of many sequences of a replica: (sequence, attempt, tokens generated in all) of each."""

    replica: ReplicaId
    progress: tuple[tuple[SequenceId, int, int], ...]


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The last token is out. A replica answers an abort that came too late with this."""

    sequence: SequenceId
    replica: ReplicaId
    attempt: int
    num_tokens_total: int


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The replica cannot generate this sequence, and another try would not help."""

    sequence: SequenceId
    replica: ReplicaId
    attempt: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SequenceAborted:
    """An abort is done: no further token of this attempt will come."""

    sequence: SequenceId
    replica: ReplicaId
    attempt: int
    num_tokens_total: int


@dataclass(frozen=True, slots=True)
class SequenceCancelled:
    """Nobody wants the sequence any more."""

    sequence: SequenceId


@dataclass(frozen=True, slots=True)
class SequencesRetired:
    """Whoever owns these finished or failed sequences has stored their outcome: they may be forgotten."""

    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class ReplicaShiftedUp:
    """A replica takes sequences from now on."""

    replica: ReplicaId
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicasShiftedUp:
    """These replicas take sequences from now on: one shift-up for all, with their KV capacities."""

    replicas: tuple[tuple[ReplicaId, int], ...]


@dataclass(frozen=True, slots=True)
class ReplicaShiftingDown:
    """These replicas leave together: empty them. One may sleep once its last abort is confirmed."""

    replicas: tuple[ReplicaId, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    """A replica is gone with everything it had not reported."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; dispatch is tried again."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Sequences may leave the slowest replica for one that has nothing to do. Not in the paper, which moves
    sequences only when a replica starts."""


SchedulerEvent = (
    SequenceSubmitted
    | TokensGenerated
    | ReplicaProgressed
    | SequenceFinished
    | SequenceFailed
    | SequenceAborted
    | SequenceCancelled
    | SequencesRetired
    | ReplicaShiftedUp
    | ReplicasShiftedUp
    | ReplicaShiftingDown
    | ReplicaDied
    | Tick
    | Rebalance
)


# Effects: what the caller carries out.


@dataclass(frozen=True, slots=True)
class RunSequence:
    """Generate on `replica` from the prompt and the tokens so far."""

    replica: ReplicaId
    sequence: SequenceId
    attempt: int


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """Stop it on `replica` and report SequenceAborted."""

    replica: ReplicaId
    sequence: SequenceId
    attempt: int


SchedulerEffect = RunSequence | AbortSequence


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One active replica. `lengths` are its sequences' tokens, ascending; it may stop at the shortest few."""

    replica: ReplicaId
    num_sequences: int
    num_tokens: int
    kv_capacity_tokens: int
    lengths: tuple[int, ...] = ()

    def all_lengths(self) -> list[int]:
        """`num_sequences` lengths, ascending: those not listed count as equally long."""
        missing = self.num_sequences - len(self.lengths)
        if missing <= 0:
            return list(self.lengths[: self.num_sequences])
        rest = max(0, self.num_tokens - sum(self.lengths)) // missing
        return sorted([*self.lengths, *[rest] * missing])


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The load of a role: its active replicas, and the lengths in its queue in dispatch order."""

    replicas: tuple[ReplicaLoad, ...] = ()
    queue: tuple[int, ...] = ()
    mean_new_tokens: float = 0.0
    """Moving average of the tokens that finished sequences have generated; 0 while unknown."""

    @property
    def num_sequences(self) -> int:
        """Running and waiting."""
        return sum(r.num_sequences for r in self.replicas) + len(self.queue)

    @property
    def num_tokens(self) -> int:
        """Resident on the replicas."""
        return sum(r.num_tokens for r in self.replicas)
