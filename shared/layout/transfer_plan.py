"""Who sends which slice to whom: greedy least accumulated latency over profiled links (paper Appendix B.2).

A *demand* is one (slice, receiver). Demands are walked in order; each goes to the candidate sender whose
accumulated latency is smallest *after* taking it; ties go to the lowest sender id. The cost of one transfer
is bytes / bandwidth(link) + overhead(link).

Bounds
    Let S be a set of senders that share candidates, s a demand, cost(i, s) its cost on sender i. When the
    last demand of the busiest sender was placed, every other candidate would have finished no earlier,
    hence::

        makespan <= total / aggregate bandwidth + largest demand at the mean bandwidth of its candidates

    With equal links the second term is the largest demand itself, so makespan <= 2 x the lower bound
    max(total / aggregate bandwidth, largest demand), where totals are taken per set of senders that a demand
    can choose from (under replication groups a slice lives on one node of each group only).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shared.layout.demands import Demand, Demands, DemandTable, demands_of, rows_by_set
from shared.layout.greedy import LinkTable, choose
from shared.layout.greedy import lower_bound_s as lower_bound_of
from shared.layout.plan_summary import PlanSummary
from shared.layout.refine import AtomicSlice, refine
from shared.layout.tensor_layout import Layout


@dataclass(frozen=True, slots=True)
class Link:
    """A profiled path. `bandwidth_bytes_per_s` > 0; `overhead_s` per transfer."""

    bandwidth_bytes_per_s: float
    overhead_s: float = 0.0

    def cost_s(self, nbytes: int) -> float:
        return nbytes / self.bandwidth_bytes_per_s + self.overhead_s


@dataclass(frozen=True)
class NodeLinks:
    """Links of a cluster where holders sit on nodes: a fast local path, a slower one between nodes.

    `node_of` maps a holder to its node; a holder that it does not name is a node itself.
    """

    local: Link
    remote: Link
    node_of: Mapping[str, str]

    def __call__(self, sender: str, receiver: str) -> Link:
        same = self.node_of.get(sender, sender) == self.node_of.get(receiver, receiver)
        return self.local if same else self.remote


LinkOf = Callable[[str, str], Link]
"""(sender, receiver) → the link between them."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One whole slice from `sender` to `receiver`, expected to take `cost_s`."""

    piece: AtomicSlice
    sender: str
    receiver: str
    cost_s: float


class TransferPlan:
    """The transfers of one Read or Write, and what they are expected to cost.

    A plan of a large model has millions of transfers: they are kept as arrays, and become objects one by one
    for whoever looks at them.
    """

    def __init__(self, plan_id: str, demands: Demands, links: LinkTable) -> None:
        self.plan_id = plan_id
        self._demands, self._links = demands, links
        self._choice = choose(demands.table, links)

    @cached_property
    def lower_bound_s(self) -> float:
        """No plan of these demands can be faster."""
        return lower_bound_of(self._demands.table, self._links)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All of them, in plan order."""
        return tuple(self._pick(lambda _rows, _chosen: None))

    def of_sender(self, sender: str) -> tuple[Transfer, ...]:
        """What `sender` has to send, in plan order."""
        number = _index(self._demands.table.senders, sender)
        return tuple(self._pick(lambda _rows, chosen: chosen == number))

    def of_receiver(self, receiver: str) -> tuple[Transfer, ...]:
        """What `receiver` will get, in plan order."""
        table = self._demands.table
        number = _index(table.receivers, receiver)
        return tuple(self._pick(lambda rows, _chosen: table.receiver[rows] == number))

    def _pick(
        self, is_wanted: Callable[[slice, NDArray[np.int32]], NDArray[np.bool_] | None]
    ) -> Iterator[Transfer]:
        table, at = self._demands.table, 0
        starts, ends = table.row_starts.tolist(), table.row_ends.tolist()
        for tensor, number in enumerate(table.class_of.tolist()):
            rows = slice(starts[number], ends[number])
            chosen = self._choice.chosen[at : at + rows.stop - rows.start]
            wanted = is_wanted(rows, chosen)
            offsets = range(len(chosen)) if wanted is None else np.flatnonzero(wanted).tolist()
            for offset in offsets:
                sender, demand = int(chosen[offset]), self._demands.at(tensor, rows.start + offset)
                receiver = int(table.receiver[rows.start + offset])
                link = Link(
                    float(self._links.bandwidth_bytes_per_s[sender, receiver]),
                    float(self._links.overhead_s[sender, receiver]),
                )
                cost_s = link.cost_s(demand.piece.nbytes)
                yield Transfer(demand.piece, table.senders[sender], demand.receiver, cost_s)
            at += len(chosen)

    def __len__(self) -> int:
        return len(self._choice.chosen)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TransferPlan)
            and self.plan_id == other.plan_id
            and self.transfers == other.transfers
        )

    def __hash__(self) -> int:
        return hash(self.plan_id)

    @property
    def load_s_per_sender(self) -> Mapping[str, float]:
        """Seconds that each sender is busy; those with nothing to send are left out."""
        return self._summary.load_s_per_sender

    @property
    def makespan_s(self) -> float:
        return self._summary.makespan_s

    def explain(self) -> PlanSummary:
        """Bytes per link, loads, makespan against its lower bound, balance. Worked out once."""
        return self._summary

    @cached_property
    def _summary(self) -> PlanSummary:
        table, choice = self._demands.table, self._choice
        per_link = {
            (table.senders[sender], table.receivers[receiver]): int(choice.link_bytes[sender, receiver])
            for sender, receiver in np.argwhere(choice.link_bytes).tolist()
        }
        busy = np.flatnonzero(choice.link_bytes.any(axis=1) | (choice.load_s > 0)).tolist()
        loads = {table.senders[sender]: float(choice.load_s[sender]) for sender in busy}
        makespan = max(loads.values(), default=0.0)
        return PlanSummary(
            plan_id=self.plan_id,
            num_transfers=len(self),
            total_bytes=sum(per_link.values()),
            bytes_per_link=dict(sorted(per_link.items())),
            load_s_per_sender=dict(sorted(loads.items())),
            makespan_s=makespan,
            lower_bound_s=self.lower_bound_s,
            balance=sum(loads.values()) / (len(table.senders) * makespan) if makespan else 1.0,
        )

    def __str__(self) -> str:
        return str(self.explain())


def _index(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1


def lower_bound_s(demands: Sequence[Demand], link_of: LinkOf) -> float:
    """No plan of `demands` can be faster, in seconds; `greedy.lower_bound_s` says why."""
    table = _as_demands(demands).table
    return lower_bound_of(table, _links(table, link_of))


def plan_transfers(demands: Sequence[Demand], link_of: LinkOf, plan_id: str = "") -> TransferPlan:
    """The greedy plan. O(demands × senders). Deterministic: equal input, equal plan."""
    found = _as_demands(demands)
    return TransferPlan(plan_id, found, _links(found.table, link_of))


def _as_demands(demands: Sequence[Demand]) -> Demands:
    return demands if isinstance(demands, Demands) else Demands(listed=demands)


def _links(table: DemandTable, link_of: LinkOf) -> LinkTable:
    shape = len(table.senders), len(table.receivers)
    links = LinkTable(np.ones(shape), np.zeros(shape))
    asked = np.zeros(shape, bool)
    for members, rows in zip(table.sets, rows_by_set(table), strict=True):
        asked[np.ix_(members, np.unique(table.receiver[rows]))] = True
    for sender, receiver in np.argwhere(asked).tolist():
        link = link_of(table.senders[sender], table.receivers[receiver])
        links.bandwidth_bytes_per_s[sender, receiver] = link.bandwidth_bytes_per_s
        links.overhead_s[sender, receiver] = link.overhead_s
    return links


@dataclass(frozen=True, slots=True)
class PlanKey:
    """⟨M, layout epoch, G, P⟩. `operation` is "read" or "write"; `layout` the digest of the caller's
    layout."""

    operation: str
    model: str
    layout_epoch: int
    receivers: tuple[str, ...]
    layout: str

    @property
    def plan_id(self) -> str:
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()


class PlanCache:
    """Plans by key; the oldest-used goes when more than `max_plans` are held."""

    def __init__(self, max_plans: int = 64) -> None:
        self._plans: dict[PlanKey, tuple[TransferPlan, frozenset[str]]] = {}
        self._max_plans = max_plans
        self.num_hits = 0
        self.num_misses = 0

    def get(self, key: PlanKey) -> TransferPlan | None:
        """The cached plan of `key`, which is then the latest used."""
        found = self._plans.pop(key, None)
        if found is None:
            return None
        self.num_hits += 1
        self._plans[key] = found
        return found[0]

    def get_or_plan(self, key: PlanKey, source: Layout, target: Layout, link_of: LinkOf) -> TransferPlan:
        """The cached plan of `key`, or a new one. Raises LayoutError if `source` lacks something."""
        if found := self.get(key):
            return found
        plan = plan_transfers(demands_of(refine(source, target)), link_of, key.plan_id)
        self.put(key, plan, source, target)
        return plan

    def put(self, key: PlanKey, plan: TransferPlan, source: Layout, target: Layout) -> None:
        """Keep a plan that was made elsewhere, for example in a thread."""
        self.num_misses += 1
        self._plans.pop(key, None)
        self._plans[key] = (plan, frozenset(source.holders) | frozenset(target.holders))
        while len(self._plans) > self._max_plans:
            del self._plans[next(iter(self._plans))]

    def invalidate(self, *, model: str | None = None, holder: str | None = None) -> int:
        """Drop the plans of `model`, or those that `holder` takes part in; both None drops all. Returns how
        many."""
        gone = [
            key
            for key, (_, holders) in self._plans.items()
            if (model is None or key.model == model) and (holder is None or holder in holders)
        ]
        for key in gone:
            del self._plans[key]
        return len(gone)

    def plans(self) -> tuple[tuple[PlanKey, TransferPlan], ...]:
        """Every cached plan, oldest-used first."""
        return tuple((key, plan) for key, (plan, _) in self._plans.items())

    def find(self, plan_id: str) -> tuple[PlanKey, TransferPlan] | None:
        return next(((key, plan) for key, plan in self.plans() if key.plan_id == plan_id), None)
