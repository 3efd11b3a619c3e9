"""The worked example of docs/gps.md, as the code works it out."""

from shared.layout.demands import demands_of
from shared.layout.held_parts import Held, paired_spans, region_spans
from shared.layout.parallel import engine_layout
from shared.layout.refine import refine
from shared.layout.regions import intersect
from shared.layout.replication import shard_over
from shared.layout.sliced_storage import slice_layouts
from shared.layout.tensor_layout import Box, TensorSpec, full_layout, whole, zero_layout
from shared.layout.transfer_plan import Link, NodeLinks, plan_transfers

NAME = "model.layers.0.mlp.down_proj.weight"
WEIGHT = TensorSpec(NAME, "bfloat16", 2, (4, 6))
RANKS = zero_layout([WEIGHT], ["r0", "r1"])
ENGINE = engine_layout([WEIGHT], [["g0", "g1"]])


def test_slices_and_bytes() -> None:
    assert [(p.box.start, p.box.shape, p.nbytes) for p in refine(RANKS, ENGINE)] == [
        ((0, 0), (2, 3), 12),
        ((0, 3), (2, 3), 12),
        ((2, 0), (2, 3), 12),
        ((2, 3), (2, 3), 12),
    ]
    storage = slice_layouts([RANKS, ENGINE])[NAME]
    assert [box.start for box in storage.boxes] == [(0, 0), (2, 0), (0, 3), (2, 3)]
    pool = {
        p.holder: region_spans(WEIGHT.shape, storage, p.region, 2)[0].tolist()
        for layout in (RANKS, ENGINE)
        for p in layout.placements
    }
    assert pool["g0"] == [[0, 24]]
    assert pool["g1"] == [[24, 24]]
    assert pool["r0"] == [[0, 6], [6, 6], [24, 6], [30, 6]]
    scattered, _ = region_spans(WEIGHT.shape, None, ENGINE.placements[0].region, 2)
    assert scattered.tolist() == [[0, 6], [12, 6], [24, 6], [36, 6]]


def test_shards_of_three_nodes() -> None:
    storage = slice_layouts([RANKS, ENGINE])[NAME]
    landing, columns = Held(whole(WEIGHT), storage), ENGINE.placements[1].region
    assert isinstance(columns, Box)
    found = {}
    for rows, node in shard_over(WEIGHT, 0, ["n0", "n1", "n2"]):
        assert isinstance(rows, Box)
        wanted = intersect(rows, columns)
        assert wanted is not None
        ends = paired_spans(Held(rows, storage.part(rows)), landing, wanted, 2)
        found[node] = tuple(side.tolist() for side in ends)
    assert found == {
        "n0": ([[12, 12]], [[24, 12]]),
        "n1": ([[6, 6]], [[36, 6]]),
        "n2": ([[6, 6]], [[42, 6]]),
    }


def test_plan() -> None:
    links = NodeLinks(Link(50e9, 10e-6), Link(25e9, 30e-6), {"g0": "n0", "g1": "n0"})
    plan = plan_transfers(demands_of(refine(full_layout([WEIGHT], ["n0", "n1"]), ENGINE)), links)
    assert [(t.receiver, t.sender, t.piece.nbytes) for t in plan.transfers] == [
        ("g0", "n0", 24),
        ("g1", "n0", 24),
    ]
    assert "48 bytes" in str(plan)
