"""The plain implementation of refinement and of the greedy plan, one object at a time: the oracle of the fast
one. It says what must come out; `shared.layout` says it quickly."""

from collections.abc import Iterable, Sequence

from shared.errors import LayoutError
from shared.layout.refine import AtomicSlice
from shared.layout.regions import disjoint_cells, intersect
from shared.layout.tensor_layout import Box, Layout, Region
from shared.layout.transfer_plan import Demand, LinkOf, Transfer


def _group(pairs: Iterable[tuple[Region, str]]) -> tuple[tuple[Region, ...], list[list[str]]]:
    holders: dict[Region, list[str]] = {}
    for region, holder in pairs:
        holders.setdefault(region, []).append(holder)
    return tuple(holders), list(holders.values())


def _slice_shape(
    shape: tuple[int, ...], sources: tuple[Region, ...], targets: tuple[Region, ...]
) -> list[tuple[Box, frozenset[int], frozenset[int]]]:
    source_cells = disjoint_cells(shape, sources)
    found = []
    for target, needs in disjoint_cells(shape, targets):
        missing = target.numel
        for source, has in source_cells:
            if (common := intersect(source, target)) is not None:
                found.append((common, has, needs))
                missing -= common.numel
        if missing:
            raise LayoutError(f"{missing} elements of the box {target.start}+{target.shape} have no source")
    found.sort(key=lambda item: item[0].start)
    return found


def refine_plainly(source: Layout, target: Layout) -> tuple[AtomicSlice, ...]:
    """Atomic slices of everything `target` needs, in tensor order of `target`, row-major within a tensor.

    Raises LayoutError if a tensor differs between the two, or a part of `target` is nowhere in `source`.
    """
    known: dict[tuple[object, ...], list[tuple[Box, frozenset[int], frozenset[int]]]] = {}
    slices: list[AtomicSlice] = []
    for name, wanted in target.by_tensor.items():
        spec = target.tensors[name]
        if source.tensors.get(name) != spec:
            raise LayoutError(
                f"tensor {name} is {spec} at the target, {source.tensors.get(name)} at the source"
            )
        sources, senders = _group(source.by_tensor.get(name, ()))
        targets, receivers = _group(wanted)
        key = (spec.shape, sources, targets)
        if key not in known:
            try:
                known[key] = _slice_shape(spec.shape, sources, targets)
            except LayoutError as error:
                raise LayoutError(f"{name}: {error.message}", tensor=name) from None
        for box, has, needs in known[key]:
            slices.append(
                AtomicSlice(
                    name,
                    box,
                    box.numel * spec.itemsize,
                    tuple(sorted({holder for i in has for holder in senders[i]})),
                    tuple(sorted({holder for i in needs for holder in receivers[i]})),
                )
            )
    return tuple(slices)


def demands_plainly(slices: Iterable[AtomicSlice]) -> list[Demand]:
    """One demand per slice and receiver. For a Write the receivers are the holders of the slice, one per
    group."""
    return [Demand(piece, receiver) for piece in slices for receiver in piece.receivers]


def lower_bound_plainly(demands: Sequence[Demand], link_of: LinkOf) -> float:
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


def plan_plainly(demands: Sequence[Demand], link_of: LinkOf) -> list[Transfer]:
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
    return transfers
