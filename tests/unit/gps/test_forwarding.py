"""How a Write reaches every holder: replayed on arrays, for random clusters and writers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gps.cluster_write import batches
from services.gps.forwarding import Hop, forward, home_group, passing_stages
from services.gps.membership import first_view
from services.gps.packing import Packing, pack_member
from shared.errors import Conflict
from shared.layout.tensor_layout import Box, Region, TensorSpec, whole, zero_range

SHAPES = {"embed": (13, 4), "w": (6, 5), "norm": (7,), "scale": ()}
SPECS = {name: TensorSpec(name, "bfloat16", 2, shape) for name, shape in SHAPES.items()}


def packings_of(num_nodes: int, size: int) -> tuple[tuple[tuple[int, ...], ...], dict[int, Packing]]:
    groups = first_view(range(num_nodes), size).groups
    return groups, {node: pack_member(SPECS, {}, group, node) for group in groups for node in group}


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


@given(
    num_nodes=st.integers(1, 7),
    size=st.integers(1, 3),
    writers=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    away=st.sets(st.integers(0, 6), max_size=2),
)
@settings(max_examples=80, deadline=None)
def test_every_holder_gets_every_byte_once_and_only_from_who_has_it(
    num_nodes: int, size: int, writers: list[int], away: set[int]
) -> None:
    groups, packings = packings_of(num_nodes, min(size, num_nodes))
    up = {node: packing for node, packing in packings.items() if node not in away}
    nodes = [sorted(up)[n % len(up)] for n in writers] if up else []
    if not any(all(node in up for node in group) for group in groups):
        with pytest.raises(Conflict, match="no replication group is complete"):
            forward(up, groups, [(0, "w", whole(SPECS["w"]))])
        return
    written: list[tuple[int, str, Region]] = [
        (node, name, zero_range(spec.numel, rank, len(nodes)))
        for rank, node in enumerate(nodes)
        for name, spec in SPECS.items()
    ]
    staged = {node: {name: np.zeros((*s.shape, 2), bool) for name, s in SPECS.items()} for node in up}
    for node, name, region in written:
        flat = staged[node][name].reshape(-1, 2)
        flat[region.start : region.start + region.count] = True  # type: ignore[union-attr]
    held = {node: {name: np.zeros((*s.shape, 2), int) for name, s in SPECS.items()} for node in up}
    hops = forward(up, groups, written)
    for stage in sorted({hop.stage for hop in hops}):
        sent: dict[tuple[int, str], np.ndarray] = {}
        before = {node: {name: a.copy() for name, a in arrays.items()} for node, arrays in held.items()}
        for hop in (hop for hop in hops if hop.stage == stage):
            where = at(hop.box)
            if stage == 0:
                assert staged[hop.sender][hop.tensor][where].all(), hop
            else:
                assert (before[hop.sender][hop.tensor][where] == 1).all(), hop
                count = sent.setdefault((hop.sender, hop.tensor), np.zeros((*SHAPES[hop.tensor], 2), int))
                count[where] += 1
            held[hop.receiver][hop.tensor][where] += 1
        if len({len(group) for group in groups}) == 1:
            assert all((count <= 1).all() for count in sent.values()), "a holder sent a byte twice in a stage"
    for node, packing in up.items():
        for name, spec in SPECS.items():
            wanted = np.zeros((*spec.shape, 2), int)
            if name in packing.boxes:
                wanted[at(packing.boxes[name])] = 1
            assert (held[node][name] == wanted).all(), (node, name)


def test_groups_double_per_stage_and_incomplete_ones_only_receive() -> None:
    groups = [(n,) for n in range(8)]
    stages = passing_stages(groups, set(groups), (2,))
    assert [len(stage) for stage in stages] == [1, 2, 4]
    assert stages[0] == [((2,), (3,))]
    degraded = passing_stages(groups, set(groups) - {(3,), (4,)}, (2,))
    assert not {(3,), (4,)} & {source for stage in degraded for source, _ in stage}
    assert {target for stage in degraded for _, target in stage} == set(groups) - {(2,)}


def test_home_is_the_writers_group_or_the_first_that_is_complete() -> None:
    groups = [(0, 1), (2, 3)]
    assert home_group(groups, set(groups), 3) == (2, 3)
    assert home_group(groups, {(0, 1)}, 3) == (0, 1)
    with pytest.raises(Conflict, match="Start the missing nodes"):
        home_group(groups, set(), 3)


def test_messages_are_bounded_and_keep_stages_apart() -> None:
    hops = [Hop(stage, 0, 1, "w", Box((i, 0), (1, 5))) for stage in (0, 1) for i in range(5)]
    found = batches(hops, 2)
    assert [[len(message) for message in stage] for stage in found] == [[2, 2, 1], [2, 2, 1]]
