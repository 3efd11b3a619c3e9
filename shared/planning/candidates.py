"""The cheapest way to gain each number of replicas (paper §7.2, Algorithm 1, Appendix D).

D[j] is the least penalty of gaining exactly j replicas from the pairs seen so far. From every pair we take
its first e replicas and pay its penalty once, or skip it. On equal penalty the later candidate in traversal
order stays.

Plans are kept as back pointers, so a transition costs O(1): O(K·I) in all for K wanted of I slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from shared.ids import ReplicaId
from shared.planning.pairs import ShiftPair


@dataclass(frozen=True, slots=True)
class Candidate:
    """A feasible shift: all of `down_replicas` (and training) leave, all of `up_replicas` start."""

    up_replicas: tuple[ReplicaId, ...]
    down_replicas: tuple[ReplicaId, ...]
    training_down: bool
    penalty_tokens: float

    @property
    def num_up(self) -> int:
        """k, the number of replicas gained."""
        return len(self.up_replicas)


@dataclass(frozen=True, slots=True)
class _Step:
    pair: ShiftPair
    num_taken: int
    before: "_Step | None"


def candidates(pairs: Sequence[ShiftPair], max_up: int) -> list[Candidate]:
    """One candidate for each reachable k in 1..`max_up`, by ascending k."""
    penalty = [0.0] + [inf] * max_up
    last: list[_Step | None] = [None] * (max_up + 1)
    for pair in pairs:
        next_penalty, next_last = penalty.copy(), last.copy()
        for j in range(max_up):
            if penalty[j] == inf:
                continue
            reached = penalty[j] + pair.penalty_tokens
            for e in range(1, min(len(pair.up_replicas), max_up - j) + 1):
                if reached <= next_penalty[j + e]:
                    next_penalty[j + e] = reached
                    next_last[j + e] = _Step(pair, e, last[j])
        penalty, last = next_penalty, next_last
    return [_candidate(last[k], penalty[k]) for k in range(1, max_up + 1) if penalty[k] < inf]


def _candidate(step: _Step | None, penalty_tokens: float) -> Candidate:
    steps: list[_Step] = []
    while step is not None:
        steps.append(step)
        step = step.before
    steps.reverse()
    return Candidate(
        up_replicas=tuple(r for s in steps for r in s.pair.up_replicas[: s.num_taken]),
        down_replicas=tuple(r for s in steps for r in s.pair.down_replicas),
        training_down=any(s.pair.training_down for s in steps),
        penalty_tokens=penalty_tokens,
    )
