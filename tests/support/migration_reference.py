"""Dispatch and migration as pseudocode written out (paper §6.1, Algorithms 2 to 4): plain and slow.

Nothing is shared with the real ones but the throughput model.
"""

from dataclasses import dataclass, field
from math import fsum, inf
from typing import Any, NamedTuple


class Seq(NamedTuple):
    """Compares by length, then by place in dispatch order."""

    length: int
    number: int
    need: int


@dataclass
class RoleState:
    """Replicas by index with their sequences; the queue; which replicas are active."""

    model: Any
    capacities: list[int]
    on: list[list[Seq]]
    queue: list[Seq] = field(default_factory=list)
    active: set[int] = field(default_factory=set)

    def copy(self) -> "RoleState":
        return RoleState(
            self.model, self.capacities, [list(on) for on in self.on], list(self.queue), set(self.active)
        )

    def throughput(self, i: int) -> float:
        return self.model.tokens_per_s(len(self.on[i]), sum(s.length for s in self.on[i]))

    def total(self) -> float:
        return fsum(self.throughput(i) for i in range(len(self.on)))

    def num_sequences(self) -> int:
        return len(self.queue) + sum(map(len, self.on))


def dispatch(role: RoleState, among: Any) -> list[tuple[Seq, int]]:
    """Algorithm 2, Dispatch: the head of the queue to the largest gain, until it fits nowhere."""
    among = sorted(among)
    state = {}
    for i in among:
        state[i] = [
            len(role.on[i]),
            sum(s.length for s in role.on[i]),
            role.capacities[i] - sum(s.need for s in role.on[i]),
        ]
    role.queue.sort(key=lambda s: s.number)
    placed = []
    while role.queue:
        s = role.queue[0]
        most, target = -inf, None
        for i in among:
            n, tok, room = state[i]
            gain = role.model.gain(n, tok, s.length)
            if room >= s.need and gain > most:
                most, target = gain, i
        if target is None:
            break
        role.queue.pop(0)
        role.on[target].append(s)
        state[target][0] += 1
        state[target][1] += s.length
        state[target][2] -= s.need
        placed.append((s, target))
    return placed


def shift_down(role: RoleState, leaving: Any) -> None:
    """Algorithm 3: everything on `leaving` goes back to the queue, then to the rest."""
    for i in leaving:
        role.active.discard(i)
        role.queue += role.on[i]
        role.on[i] = []
    dispatch(role, role.active)


def shift_up(role: RoleState, new: Any, migrate: bool = True) -> list[tuple[Seq, int, int]]:
    """Algorithm 4: the queue to `new`, then the shortest off the fastest while the total rises."""
    role.active |= set(new)
    dispatch(role, new)
    moves: list[tuple[Seq, int, int]] = []
    while migrate and not role.queue:
        speeds = {i: role.throughput(i) for i in sorted(role.active)}
        source = max(speeds, key=lambda i: (speeds[i], -i))
        if not role.on[source]:
            break
        shortest = min(role.on[source])
        role.on[source].remove(shortest)
        role.queue = [shortest]
        placed = dispatch(role, role.active)
        after = {i: role.throughput(i) for i in {source, *(i for _, i in placed)}}
        # T' <= T, compared exactly rather than after rounding.
        if not placed or fsum([*after.values(), *(-speeds[i] for i in after)]) <= 0:
            if placed:
                role.on[placed[0][1]].remove(shortest)
            role.on[source].append(shortest)
            role.queue = []
            break
        moves.append((shortest, source, placed[0][1]))
    return moves
