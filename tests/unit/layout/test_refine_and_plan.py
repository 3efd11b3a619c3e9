"""Random layouts on both sides, replayed on numpy: bit exact, every byte once, near the lower bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import LayoutError
from shared.layout.parallel import split_box, split_fused, stage_tensors
from shared.layout.refine import AtomicSlice, refine
from shared.layout.regions import cover_problem, disjoint_cells, flat_to_boxes, region_boxes
from shared.layout.replication import form_groups, grouped_layout
from shared.layout.tensor_layout import (
    Box,
    FlatRange,
    Layout,
    Placement,
    Region,
    TensorSpec,
    full_layout,
    index_specs,
    merge_layouts,
    narrow,
    whole,
    zero_layout,
    zero_range,
)
from shared.layout.transfer_plan import (
    Demand,
    Link,
    NodeLinks,
    PlanCache,
    PlanKey,
    demands_of,
    lower_bound_s,
    plan_transfers,
)
from tests.support.layouts import regions


def spec(name: str, *shape: int, itemsize: int = 2) -> TensorSpec:
    return TensorSpec(name, "bfloat16" if itemsize == 2 else "float32", itemsize, shape)


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    found = draw(st.lists(shapes, min_size=1, max_size=4))
    return [TensorSpec(f"model.layers.{i}.w", "float32", 4, shape) for i, shape in enumerate(found)]


@st.composite
def complete_layouts(draw: st.DrawFn, specs: list[TensorSpec], prefix: str) -> Layout:
    """Every element is somewhere: ZeRO, rows or columns with uneven cuts, whole copies, groups; plus odd
    extras."""
    placements: list[Placement] = []
    holders = [f"{prefix}{i}" for i in range(draw(st.integers(1, 5)))]
    for item in specs:
        kind = draw(st.sampled_from(["zero", "cut", "whole", "groups"]))
        if kind == "zero":
            placements += [
                Placement(item.name, zero_range(item.numel, r, len(holders)), h)
                for r, h in enumerate(holders)
            ]
        elif kind == "cut" and item.shape:
            dim = draw(st.integers(0, len(item.shape) - 1))
            cuts = sorted(draw(st.lists(st.integers(0, item.shape[dim]), max_size=len(holders) - 1)))
            bounds = [0, *cuts, item.shape[dim]]
            for h, a, b in zip(holders, bounds, bounds[1:], strict=False):
                placements.append(Placement(item.name, narrow(item, dim, a, b - a), h))
        elif kind == "groups":
            placements += [
                p for p in grouped_layout(specs, holders, 1 << 60).layout.placements if p.tensor == item.name
            ]
        else:
            placements += [Placement(item.name, whole(item), h) for h in holders[:2]]
        for _ in range(draw(st.integers(0, 2))):
            extra = draw(regions(item.shape))
            placements.append(Placement(item.name, extra, draw(st.sampled_from(holders))))
    return Layout(index_specs(specs), tuple(placements))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    specs = draw(spec_lists())
    return draw(complete_layouts(specs, "n")), draw(complete_layouts(specs, "g"))


def mask_of(layout: Layout, holder: str, item: TensorSpec) -> np.ndarray:
    mask = np.zeros(item.shape, bool)
    for p in layout.placements:
        if p.tensor == item.name and p.holder == holder:
            if isinstance(p.region, FlatRange):
                mask.reshape(-1)[p.region.start : p.region.start + p.region.count] = True
            else:
                mask[slices_of(p.region)] = True
    return mask


@given(layout_pairs())
@settings(max_examples=200, deadline=None)
def test_plan_replayed_on_arrays_is_bit_exact_and_delivers_every_byte_once(
    pair: tuple[Layout, Layout],
) -> None:
    source, target = pair
    plan = plan_transfers(demands_of(refine(source, target)), lambda _s, _r: Link(1e9, 1e-6))
    for item in target.tensors.values():
        truth = np.random.default_rng(0).integers(0, 1 << 30, item.shape, dtype=np.int32)
        truth = np.asarray(truth, np.int32)
        for receiver in target.holders:
            needed = mask_of(target, receiver, item)
            got = np.zeros(item.shape, np.int32)
            times = np.zeros(item.shape, int)
            for t in plan.of_receiver(receiver):
                if t.piece.tensor != item.name:
                    continue
                at = slices_of(t.piece.box)
                assert mask_of(source, t.sender, item)[at].all(), "the sender has the whole slice"
                got[at] = truth[at]
                times[at] += 1
            assert (times == needed).all()
            assert (got == np.where(needed, truth, 0)).all()
    assert sum(t.piece.nbytes for t in plan.transfers) == plan.explain().total_bytes


@given(layout_pairs())
@settings(max_examples=100, deadline=None)
def test_slices_are_disjoint_and_indivisible_on_both_sides(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    for piece in refine(source, target):
        at = slices_of(piece.box)
        item = target.tensors[piece.tensor]
        for layout, who in ((source, piece.senders), (target, piece.receivers)):
            for holder in layout.holders:
                part = mask_of(layout, holder, item)[at]
                assert part.all() if holder in who else not part.any()


@given(st.data(), shapes.filter(bool))
@settings(deadline=None)
def test_flat_range_becomes_few_boxes_in_row_major_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    numel = int(np.prod(shape))
    start = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - start))
    boxes = flat_to_boxes(shape, start, count)
    index = np.arange(numel).reshape(shape)
    flat = [int(i) for box in boxes for i in index[slices_of(box)].reshape(-1)]
    assert flat == list(range(start, start + count))
    assert len(boxes) <= 2 * len(shape) - 1


@given(st.data(), shapes)
@settings(deadline=None)
def test_cells_are_disjoint_and_name_all_owners(data: st.DataObject, shape: tuple[int, ...]) -> None:
    chosen = data.draw(st.lists(regions(shape), max_size=5))
    times = np.zeros(shape, int)
    for box, owners in disjoint_cells(shape, chosen):
        times[slices_of(box)] += 1
        for index, region in enumerate(chosen):
            mine = np.zeros(shape, bool)
            for part in region_boxes(shape, region):
                mine[slices_of(part)] = True
            assert mine[slices_of(box)].all() if index in owners else not mine[slices_of(box)].any()
    assert times.max(initial=0) <= 1


@given(st.data(), shapes)
@settings(deadline=None)
def test_cover_is_exact_or_says_what_is_wrong(data: st.DataObject, shape: tuple[int, ...]) -> None:
    item = TensorSpec("t", "float32", 4, shape)
    if data.draw(st.booleans()):
        world = data.draw(st.integers(1, 4))
        chosen: list[Region] = [zero_range(item.numel, r, world) for r in range(world)]
    else:
        chosen = data.draw(st.lists(regions(shape), max_size=4))
    times = np.zeros(shape, int)
    for region in chosen:
        for part in region_boxes(shape, region):
            times[slices_of(part)] += 1
    assert (cover_problem(item, chosen) is None) == bool((times == 1).all())


def random_slices(data: st.DataObject, num_groups: int, size: int, receivers: list[str]) -> list[Demand]:
    """Demands on a grouped store: slice of shard j can come from member j of any group."""
    demands = []
    for index in range(data.draw(st.integers(1, 30))):
        shard = data.draw(st.integers(0, size - 1))
        senders = tuple(f"n{g * size + shard}" for g in range(num_groups))
        piece = AtomicSlice(
            f"t{index}", Box((0,), (1,)), data.draw(st.integers(1, 10**6)), senders, tuple(receivers)
        )
        demands += [Demand(piece, receiver) for receiver in receivers]
    return demands


@given(st.data())
@settings(deadline=None)
def test_makespan_is_within_twice_the_lower_bound_on_equal_links(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    demands = random_slices(data, groups, size, ["g0", "g1"][: data.draw(st.integers(1, 2))])
    plan = plan_transfers(demands, lambda _s, _r: Link(2e9))
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    assert plan.makespan_s <= 2 * plan.lower_bound_s * (1 + 1e-9)


@given(st.data())
@settings(deadline=None)
def test_makespan_on_unequal_senders_is_fluid_bound_plus_one_mean_transfer(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 6))
    speed = {f"n{i}": data.draw(st.sampled_from([1e9, 5e9, 25e9, 55e9])) for i in range(num)}
    demands = random_slices(data, num, 1, ["g0"])
    plan = plan_transfers(demands, lambda sender, _r: Link(speed[sender]))
    total, largest = sum(d.piece.nbytes for d in demands), max(d.piece.nbytes for d in demands)
    aggregate = sum(speed.values())
    assert plan.makespan_s <= (total / aggregate + largest / (aggregate / num)) * (1 + 1e-9)
    assert plan.makespan_s >= lower_bound_s(demands, lambda sender, _r: Link(speed[sender])) * (1 - 1e-9)


def test_local_node_gets_more_than_remote_ones() -> None:
    """Figure 16: with a PCIe path from n2 and RDMA from the rest, n2 takes the first two slices it is free
    for."""
    senders = ("n0", "n1", "n2", "n3")
    pieces = [AtomicSlice(f"s{i}", Box((0,), (1,)), 100, senders, ("gpu0",)) for i in range(5)]
    links = NodeLinks(local=Link(1250), remote=Link(1000), node_of={"gpu0": "n2"})
    plan = plan_transfers(demands_of(pieces), links)
    assert [t.sender for t in plan.transfers] == ["n2", "n0", "n1", "n3", "n2"]


def test_ties_go_to_the_lowest_sender_and_plans_repeat() -> None:
    pieces = [AtomicSlice(f"s{i}", Box((0,), (1,)), 8, ("a", "b"), ("r",)) for i in range(3)]
    plans = [plan_transfers(demands_of(pieces), lambda _s, _r: Link(1.0)) for _ in range(2)]
    assert [t.sender for t in plans[0].transfers] == ["a", "b", "a"]
    assert plans[0] == plans[1]


def test_smallest_group_that_fits_the_budget_is_chosen() -> None:
    specs = [spec("a", 8, 4), spec("b", 4, 4)]
    nodes = ["n0", "n1", "n2", "n3", "n4"]
    total = 96
    assert grouped_layout(specs, nodes, total).group_size == 1
    assert grouped_layout(specs, nodes, total - 1).group_size == 2
    assert grouped_layout(specs, nodes, total // 2 - 1).group_size > 2
    assert form_groups(nodes, 2) == (("n0", "n1", "n2"), ("n3", "n4"))
    with pytest.raises(ValueError, match="exceeds the budget"):
        grouped_layout(specs, nodes, 3)


@given(spec_lists(), st.integers(1, 7), st.integers(1, 4))
@settings(deadline=None)
def test_every_group_has_the_whole_model_and_no_node_is_over_budget(
    specs: list[TensorSpec], num_nodes: int, divisor: int
) -> None:
    nodes = [f"n{i}" for i in range(num_nodes)]
    budget = max(sum(s.nbytes for s in specs) // divisor, 1)
    try:
        grouped = grouped_layout(specs, nodes, budget)
    except ValueError:
        return
    assert all(grouped.layout.nbytes_of(node) <= budget for node in nodes)
    assert sorted(n for g in grouped.groups for n in g) == sorted(nodes)
    for group in grouped.groups:
        for item in specs:
            held = [r for r, h in grouped.layout.by_tensor[item.name] if h in group]
            assert cover_problem(item, held) is None


def test_write_reaches_one_holder_in_every_group() -> None:
    specs = [spec("a", 8, 4), spec("b", 3)]
    store = grouped_layout(specs, ["n0", "n1", "n2", "n3"], 50)
    assert store.group_size == 2
    plan = plan_transfers(
        demands_of(refine(zero_layout(specs, ["r0", "r1"]), store.layout)), lambda _s, _r: Link(1)
    )
    for group in store.groups:
        sent = sum(t.piece.nbytes for t in plan.transfers if t.receiver in group)
        assert sent == sum(s.nbytes for s in specs)


def test_layout_builders_cut_as_the_engines_do() -> None:
    vocabulary = spec("embed", 10, 4)
    parts = [split_box(vocabulary, 0, r, 4, padded_size=12) for r in range(4)]
    assert [(p.start[0], p.shape[0]) for p in parts] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert split_fused(spec("gate_up", 8, 2), 0, (4, 4), 1, 2) == (Box((2, 0), (2, 2)), Box((6, 0), (2, 2)))
    with pytest.raises(ValueError, match="cannot be cut"):
        split_box(vocabulary, 0, 0, 3)
    specs = [
        spec("model.embed_tokens.weight", 4),
        *(spec(f"model.layers.{i}.w", 4) for i in range(4)),
        spec("n", 4),
    ]
    first = stage_tensors(specs, 0, 2, with_input=True, with_output=False)
    last = stage_tensors(specs, 2, 4, with_input=False, with_output=True)
    both = merge_layouts([full_layout(first, ["s0"]), full_layout(last, ["s1"])])
    assert first[0].name == "model.embed_tokens.weight"
    assert all(cover_problem(s, [r for r, _ in both.by_tensor[s.name]]) is None for s in specs)


def test_missing_source_is_an_error_that_names_the_tensor() -> None:
    item = spec("w", 4, 4)
    half = Layout({"w": item}, (Placement("w", narrow(item, 0, 0, 2), "n0"),))
    with pytest.raises(LayoutError, match="w: 8 elements"):
        refine(half, full_layout([item], ["g0"]))


def test_region_outside_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        Layout({"w": spec("w", 4)}, (Placement("w", FlatRange(2, 3), "n0"),))
    with pytest.raises(ValueError, match="outside dimension 0"):
        Layout({"w": spec("w", 4)}, (Placement("w", Box((2,), (3,)), "n0"),))


def test_cache_hits_and_forgets_what_a_membership_change_touches() -> None:
    specs = [spec("w", 8)]
    store, cache = full_layout(specs, ["n0", "n1"]), PlanCache(max_plans=2)
    target = full_layout(specs, ["g0"])

    def key(receiver: str, epoch: int = 0) -> PlanKey:
        return PlanKey("read", "policy", epoch, (receiver,), target.digest)

    links = NodeLinks(Link(5e10), Link(1e10), {"g0": "n0"})
    first = cache.get_or_plan(key("g0"), store, target, links)
    assert cache.get_or_plan(key("g0"), store, target, links) is first
    assert (cache.num_hits, cache.num_misses) == (1, 1)
    assert cache.find(first.plan_id) is not None
    assert cache.get_or_plan(key("g0", 1), store, target, links).plan_id != first.plan_id
    assert cache.invalidate(holder="n9") == 0
    assert cache.invalidate(holder="n1") == 2
    assert cache.plans() == ()
    for receiver in ("a", "b", "c"):
        cache.get_or_plan(key(receiver), store, target, links)
    assert [k.receivers for k, _ in cache.plans()] == [("b",), ("c",)]
    assert cache.invalidate(model="policy") == 2


def test_explain_adds_up() -> None:
    specs = [spec("w", 8, 4), spec("b", 8)]
    plan = plan_transfers(
        demands_of(refine(full_layout(specs, ["n0", "n1"]), full_layout(specs, ["g0", "g1"]))),
        NodeLinks(Link(50.0), Link(10.0), {"g0": "n0", "g1": "n1"}),
    )
    summary = plan.explain()
    assert summary.total_bytes == 2 * sum(s.nbytes for s in specs) == sum(summary.bytes_per_link.values())
    assert summary.makespan_s == max(summary.load_s_per_sender.values()) >= summary.lower_bound_s
    assert 0 < summary.balance <= 1
