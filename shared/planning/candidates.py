"""The cheapest way to gain each number of replicas (paper §7.2, Algorithm 1, Appendix D).

D[j] is the least penalty of gaining exactly j replicas from the pairs seen so far. From every pair we take
its first e replicas and pay its penalty once, or skip it. On equal penalty the later candidate in traversal
order stays.

The replicas taken of each pair are kept in a table, and a candidate is put together only when it is looked
at: O(K·I) in all for K wanted of I slots, in vectors over j.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

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


class Candidates(Sequence[Candidate]):
    """One candidate for each reachable k, by ascending k."""

    def __init__(
        self,
        pairs: Sequence[ShiftPair],
        penalty: npt.NDArray[np.float64],
        taken: npt.NDArray[np.int32],
    ) -> None:
        self._pairs, self._penalty, self._taken = pairs, penalty, taken
        self._reached: list[int] = (np.flatnonzero(np.isfinite(penalty[1:])) + 1).tolist()
        self._known: dict[int, Candidate] = {}

    def __len__(self) -> int:
        return len(self._reached)

    def __iter__(self) -> Iterator[Candidate]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, i: int) -> Candidate: ...
    @overload
    def __getitem__(self, i: slice) -> list[Candidate]: ...
    def __getitem__(self, i: int | slice) -> Candidate | list[Candidate]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        k = self._reached[i]
        if k not in self._known:
            self._known[k] = self._of(k)
        return self._known[k]

    def penalty_tokens(self, i: int) -> float:
        """Of candidate `i`, without putting it together."""
        return float(self._penalty[self._reached[i]])

    def _of(self, k: int) -> Candidate:
        parts: list[tuple[ShiftPair, int]] = []
        left = k
        for pair, taken in zip(reversed(self._pairs), reversed(self._taken), strict=True):
            if num := int(taken[left]):
                parts.append((pair, num))
                left -= num
        parts.reverse()
        return Candidate(
            up_replicas=tuple(r for pair, num in parts for r in pair.up_replicas[:num]),
            down_replicas=tuple(r for pair, _ in parts for r in pair.down_replicas),
            training_down=any(pair.training_down for pair, _ in parts),
            penalty_tokens=float(self._penalty[k]),
        )


def candidates(pairs: Sequence[ShiftPair], max_up: int) -> Candidates:
    """One candidate for each reachable k in 1..`max_up`."""
    penalty = np.full(max_up + 1, np.inf)
    penalty[0] = 0.0
    taken = np.zeros((len(pairs), max_up + 1), np.int32)
    for pair, taken_of_pair in zip(pairs, taken, strict=True):
        reached = penalty + pair.penalty_tokens
        after = penalty.copy()
        # Into one j, fewer replicas of this pair come from a later state: the last of equals stays.
        for e in range(min(len(pair.up_replicas), max_up), 0, -1):
            is_better = (reached[:-e] <= after[e:]) & np.isfinite(reached[:-e])
            after[e:][is_better] = reached[:-e][is_better]
            taken_of_pair[e:][is_better] = e
        penalty = after
    return Candidates(pairs, penalty, taken)
