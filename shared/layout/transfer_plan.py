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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
class Demand:
    """`receiver` needs `piece`; any of `piece.senders` can send it."""

    piece: AtomicSlice
    receiver: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """One whole slice from `sender` to `receiver`, expected to take `cost_s`."""

    piece: AtomicSlice
    sender: str
    receiver: str
    cost_s: float


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a person wants to know of a plan. `balance` is mean / largest sender load: 1.0 is perfect."""

    plan_id: str
    num_transfers: int
    total_bytes: int
    bytes_per_link: Mapping[tuple[str, str], int]
    load_s_per_sender: Mapping[str, float]
    makespan_s: float
    lower_bound_s: float
    balance: float


@dataclass(frozen=True)
class TransferPlan:
    """The transfers of one Read or Write, and what they are expected to cost."""

    plan_id: str
    transfers: tuple[Transfer, ...]
    lower_bound_s: float

    @cached_property
    def load_s_per_sender(self) -> Mapping[str, float]:
        loads: dict[str, float] = {}
        for t in self.transfers:
            loads[t.sender] = loads.get(t.sender, 0.0) + t.cost_s
        return dict(sorted(loads.items()))

    @property
    def makespan_s(self) -> float:
        return max(self.load_s_per_sender.values(), default=0.0)

    def of_sender(self, sender: str) -> tuple[Transfer, ...]:
        """What `sender` has to send, in plan order."""
        return tuple(t for t in self.transfers if t.sender == sender)

    def of_receiver(self, receiver: str) -> tuple[Transfer, ...]:
        """What `receiver` will get, in plan order."""
        return tuple(t for t in self.transfers if t.receiver == receiver)

    def explain(self) -> PlanSummary:
        """Bytes per link, loads, makespan against its lower bound, balance. Worked out once."""
        return self._summary

    @cached_property
    def _summary(self) -> PlanSummary:
        per_link: dict[tuple[str, str], int] = {}
        for t in self.transfers:
            key = (t.sender, t.receiver)
            per_link[key] = per_link.get(key, 0) + t.piece.nbytes
        loads = self.load_s_per_sender
        makespan = self.makespan_s
        senders = {sender for t in self.transfers for sender in t.piece.senders}
        return PlanSummary(
            plan_id=self.plan_id,
            num_transfers=len(self.transfers),
            total_bytes=sum(per_link.values()),
            bytes_per_link=dict(sorted(per_link.items())),
            load_s_per_sender=loads,
            makespan_s=makespan,
            lower_bound_s=self.lower_bound_s,
            balance=sum(loads.values()) / (len(senders) * makespan) if makespan else 1.0,
        )


def demands_of(slices: Iterable[AtomicSlice]) -> list[Demand]:
    """One demand per slice and receiver. For a Write the receivers are the holders of the slice, one per
    group."""
    return [Demand(piece, receiver) for piece in slices for receiver in piece.receivers]


def lower_bound_s(demands: Sequence[Demand], link_of: LinkOf) -> float:
    """No plan can be faster, in seconds.

    The larger of the largest demand on its fastest link and, for every set of senders that some demand
    chooses from, the demands that can go nowhere else over the bandwidth of the set (a sender counts with
    its fastest link).
    """
    largest = 0.0
    work: dict[tuple[str, ...], int] = {}
    best: dict[str, float] = {}
    for demand in demands:
        links = [(s, link_of(s, demand.receiver)) for s in demand.piece.senders]
        largest = max(largest, min(link.cost_s(demand.piece.nbytes) for _, link in links))
        work[demand.piece.senders] = work.get(demand.piece.senders, 0) + demand.piece.nbytes
        for sender, link in links:
            best[sender] = max(best.get(sender, 0.0), link.bandwidth_bytes_per_s)
    sets = {senders: frozenset(senders) for senders in work}
    fluid = 0.0
    for senders in sets.values():
        captive = sum(nbytes for other, nbytes in work.items() if sets[other] <= senders)
        fluid = max(fluid, captive / sum(best[s] for s in senders))
    return max(largest, fluid)


def plan_transfers(demands: Sequence[Demand], link_of: LinkOf, plan_id: str = "") -> TransferPlan:
    """The greedy plan. O(demands × senders). Deterministic: equal input, equal plan."""
    load: dict[str, float] = {}
    transfers = []
    for demand in demands:
        chosen, chosen_cost, chosen_load = "", 0.0, float("inf")
        for sender in demand.piece.senders:
            cost = link_of(sender, demand.receiver).cost_s(demand.piece.nbytes)
            after = load.get(sender, 0.0) + cost
            if after < chosen_load:
                chosen, chosen_cost, chosen_load = sender, cost, after
        assert chosen, "a refined slice has at least one sender"
        load[chosen] = chosen_load
        transfers.append(Transfer(demand.piece, chosen, demand.receiver, chosen_cost))
    return TransferPlan(plan_id, tuple(transfers), lower_bound_s(demands, link_of))


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
