"""What a candidate would bring: replayed migration, combined throughput, benefit (paper §7.3).

    T = (N_rollout + N_reward) / (N_rollout / T_rollout + N_reward / T_reward)      tokens/s

with N running and waiting sequences: the weighted harmonic mean, because a sample needs both roles and the
slower one decides. A role without sequences drops out; a role with sequences and no throughput makes T
zero.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from shared.ids import ReplicaId
from shared.scheduling.migration import WAITING, Heaps, ReplicaLoads, Sequences, shift_down, shift_up
from shared.scheduling.sequence import RoleLoad
from shared.scheduling.throughput import UNIT, ThroughputModel


def combined_tokens_per_s(n_rollout: float, t_rollout: float, n_reward: float, t_reward: float) -> float:
    """The weighted harmonic mean of the module docstring.

    >>> combined_tokens_per_s(10, 100.0, 30, 100.0)
    100.0
    >>> combined_tokens_per_s(10, 100.0, 30, 0.0)
    0.0
    """
    latency_s = 0.0
    for n, t in ((n_rollout, t_rollout), (n_reward, t_reward)):
        if n and not t:
            return 0.0
        latency_s += n / t if n else 0.0
    return (n_rollout + n_reward) / latency_s if latency_s else 0.0


def generation_latency(num_sequences: float, tokens_per_s: float) -> float:
    """τ = N/T: how pressed a role is. 0 without sequences, infinite with sequences and no throughput."""
    if not num_sequences:
        return 0.0
    return num_sequences / tokens_per_s if tokens_per_s else float("inf")


class ShiftedUp(NamedTuple):
    """What a shift-up brings, and what it moves."""

    tokens_per_s: float
    """Throughput of the role."""
    moved_tokens: int
    """Resident tokens of the running sequences that migration stopped, all to be prefilled again."""


class RoleReplay:
    """One role's load, ready to be replayed with replicas added or taken away.

    `active` are the replicas that hold devices. Work reported on any other replica counts as waiting; an
    active replica that was not reported counts as empty. Running sequences come before waiting ones in
    dispatch order. `work` is N of the module docstring: sequences, or tokens if they are weighed, and
    `coming_work` on top while there are any.
    """

    def __init__(
        self,
        load: RoleLoad,
        active: Sequence[ReplicaId],
        inactive: Sequence[ReplicaId],
        *,
        model: ThroughputModel | None,
        migrate: bool,
        kv_capacity_tokens: int,
        growth_tokens: int,
        tokens_per_sequence: float = 1.0,
        coming_work: float = 0.0,
        min_gain_share: float = 0.0,
    ) -> None:
        reported = {r.replica: r for r in load.replicas}
        capacity = {
            replica: reported[replica].kv_capacity_tokens if replica in reported else kv_capacity_tokens
            for replica in (*active, *inactive)
        }
        self.num_sequences = load.num_sequences
        self.work = load.num_sequences * tokens_per_sequence + coming_work * bool(load.num_sequences)
        self._migrate = migrate
        self._loads = ReplicaLoads(model or UNIT, capacity, min_gain_share=min_gain_share if model else 0.0)
        index = self._loads.index
        self._loads.set_open([index[replica] for replica in inactive], False)
        self._sequences = _sequences(load, {r: index[r] for r in active}, growth_tokens)
        self._loads.add_all(*self._sequences)
        self.tokens_per_s = self._loads.total_tokens_per_s
        """Throughput of the role as it is."""
        self._heaps: Heaps | None = None
        self._known: dict[frozenset[ReplicaId], float] = {}

    def tokens_per_s_of(self, replica: ReplicaId) -> float:
        """Throughput of one replica as it is."""
        return self._loads.tokens_per_s(self._loads.index[replica])

    def num_tokens_of(self, replica: ReplicaId) -> int:
        """Tokens resident on one replica."""
        return self._loads.num_tokens(self._loads.index[replica])

    def after_shift_up(self, replicas: Sequence[ReplicaId]) -> ShiftedUp:
        """The role once `replicas` started and migration settled."""
        loads = self._loads.copy()
        if self._heaps is None:
            self._heaps = Heaps.of(self._sequences, len(loads.ids))
        new = [loads.index[r] for r in replicas]
        moves = shift_up(loads, self._sequences, self._heaps.copy(), new, migrate=self._migrate)
        return ShiftedUp(loads.total_tokens_per_s, int(self._sequences.lengths[moves[:, 0]].sum()))

    def after_shift_down(self, replicas: Sequence[ReplicaId]) -> float:
        """Throughput of the role once the work of `replicas` went to the others."""
        if not replicas:
            return self.tokens_per_s
        leaving = frozenset(replicas)
        if leaving not in self._known:
            loads = self._loads.copy()
            shift_down(loads, self._sequences, [loads.index[r] for r in replicas])
            self._known[leaving] = loads.total_tokens_per_s
        return self._known[leaving]


def _sequences(load: RoleLoad, homes: Mapping[ReplicaId, int], growth_tokens: int) -> Sequences:
    """All sequences of `load` in dispatch order; those not on a replica with a home wait."""
    by_replica = [replica.all_lengths() for replica in load.replicas]
    at = [homes.get(replica.replica, WAITING) for replica in load.replicas]
    by_replica.append(list(load.queue))
    at.append(WAITING)
    lengths = np.fromiter(chain.from_iterable(by_replica), np.int64)
    return Sequences(lengths, lengths + growth_tokens, np.repeat(at, [len(each) for each in by_replica]))
