"""The fast planner equals the plain one, and its plans move the right bytes, whatever the two layouts are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.layout import greedy
from shared.layout.demands import Demands, demands_of
from shared.layout.parallel import cut_dimension, engine_layout
from shared.layout.refine import refine
from shared.layout.replication import grouped_layout
from shared.layout.spans import box_spans
from shared.layout.tensor_layout import Layout, TensorSpec, full_layout, zero_layout
from shared.layout.transfer_plan import Link, LinkOf, NodeLinks, TransferPlan, plan_transfers
from tests.support.layout_oracle import (
    demands_plainly,
    lower_bound_plainly,
    plan_plainly,
    refine_plainly,
)
from tests.support.layouts import transfers

LINKS = (Link(55e9, 1e-5), Link(25e9, 2e-5), Link(7e9))


def links_of(seed: int) -> LinkOf:
    def link_of(sender: str, receiver: str) -> Link:
        return LINKS[hash_of(f"{seed}{sender}>{receiver}") % len(LINKS)]

    return link_of


def hash_of(text: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(text))


@given(transfers(), st.integers(0, 9), st.booleans())
@settings(max_examples=150, deadline=None)
def test_slices_plan_and_costs_equal_the_plain_implementation(
    pair: tuple[Layout, Layout], seed: int, is_listed: bool
) -> None:
    source, target = pair
    slices, expected = refine(source, target), refine_plainly(source, target)
    assert tuple(slices) == expected
    assert len(slices) == len(expected)
    link_of = links_of(seed)
    demands = list(demands_of(slices)) if is_listed else demands_of(slices)
    plain = demands_plainly(expected)
    assert list(demands) == plain
    plan = plan_transfers(demands, link_of)
    assert list(plan.transfers) == plan_plainly(plain, link_of)
    bound = lower_bound_plainly(plain, link_of)
    assert bound * (1 - 1e-12) <= plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    for receiver in target.holders[:2]:
        assert plan.of_receiver(receiver) == tuple(t for t in plan.transfers if t.receiver == receiver)
    for sender in source.holders[:2]:
        assert plan.of_sender(sender) == tuple(t for t in plan.transfers if t.sender == sender)
    loads: dict[str, float] = {}
    for t in plan.transfers:
        loads[t.sender] = loads.get(t.sender, 0.0) + t.cost_s
    assert dict(plan.load_s_per_sender) == loads


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_slices_and_demands_can_be_asked_for_by_number(data: st.DataObject) -> None:
    slices = refine(*data.draw(transfers()))
    demands = demands_of(slices)
    for found in (slices, demands):
        every = list(found)
        index = data.draw(st.integers(-len(every), len(every) - 1))
        assert found[index] == every[index]
        assert found[index:] == tuple(every[index:])
        with pytest.raises(IndexError):
            found[len(every)]


def held(layout: Layout, holder: str, item: TensorSpec) -> np.ndarray:
    """Which bytes of `item` `holder` has, shape (nbytes,)."""
    mask = np.zeros((*item.shape, item.itemsize), bool)
    for region, other in layout.by_tensor.get(item.name, ()):
        if other != holder:
            continue
        if hasattr(region, "count"):
            flat = mask.reshape(-1)
            flat[region.start * item.itemsize : (region.start + region.count) * item.itemsize] = True
        else:
            mask[tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))] = True
    return mask.reshape(-1)


@given(transfers())
@settings(max_examples=100, deadline=None)
def test_replayed_on_bytes_every_receiver_gets_its_shard_and_each_byte_once(
    pair: tuple[Layout, Layout],
) -> None:
    source, target = pair
    plan = plan_transfers(demands_of(refine(source, target)), links_of(0))
    rng = np.random.default_rng(0)
    truth = {name: rng.integers(1, 256, item.nbytes, np.uint8) for name, item in target.tensors.items()}
    have = {
        (h, n): np.where(held(source, h, i), truth[n], 0)
        for h in source.holders
        for n, i in source.tensors.items()
    }
    for receiver in target.holders:
        got = {name: np.zeros(item.nbytes, np.uint8) for name, item in target.tensors.items()}
        times = {name: np.zeros(item.nbytes, int) for name, item in target.tensors.items()}
        for t in plan.of_receiver(receiver):
            item = target.tensors[t.piece.tensor]
            for offset, length in box_spans(item.shape, t.piece.box, item.itemsize).tolist():
                at = slice(offset, offset + length)
                got[item.name][at] = have[t.sender, item.name][at]
                times[item.name][at] += 1
        for name, item in target.tensors.items():
            needed = held(target, receiver, item)
            assert np.array_equal(times[name], needed.astype(int))
            assert np.array_equal(got[name], np.where(needed, truth[name], 0))


def layers(count: int) -> list[TensorSpec]:
    found = []
    for layer in range(count):
        at = f"model.layers.{layer}"
        found += [
            TensorSpec(f"{at}.self_attn.k_proj.weight", "bfloat16", 2, (128, 256)),
            TensorSpec(f"{at}.mlp.up_proj.weight", "bfloat16", 2, (512, 256)),
            TensorSpec(f"{at}.mlp.down_proj.weight", "bfloat16", 2, (256, 512)),
            TensorSpec(f"{at}.norm.weight", "bfloat16", 2, (256,)),
        ]
    return found


NODES = [f"n{i}" for i in range(4)]
DEVICES = [f"{node}g{i}" for node in NODES for i in range(8)]
NODE_LINKS = NodeLinks(Link(55e9, 1e-5), Link(25e9, 2e-5), {device: device[:2] for device in DEVICES})


def big_plan() -> tuple[Demands, TransferPlan]:
    specs = layers(160)
    store = grouped_layout(specs, NODES, sum(s.nbytes for s in specs) // 2 + 4096)
    assert store.group_size == 2
    replicas = [DEVICES[i : i + 8] for i in range(0, 32, 8)]
    demands = demands_of(refine(store.layout, engine_layout(specs, replicas, num_kv_heads=4)))
    return demands, plan_transfers(demands, NODE_LINKS)


def test_compiled_and_interpreted_walks_agree_and_end_near_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    demands, plan = big_plan()
    assert len(demands) >= greedy._WORTH_COMPILING
    monkeypatch.setattr(greedy, "_WORTH_COMPILING", 1 << 60)
    _, interpreted = big_plan()
    assert np.array_equal(plan._choice.chosen, interpreted._choice.chosen)
    assert plan.explain() == interpreted.explain()
    assert plan.makespan_s <= 1.1 * plan.lower_bound_s


def test_layers_that_look_alike_are_refined_once() -> None:
    specs = layers(50)
    slices = refine(zero_layout(specs, DEVICES), full_layout(specs, NODES))
    assert len(slices.classes) == 4
    assert len({id(slices.classes[i]) for i in slices.class_of}) == len(slices.classes)


def test_a_plan_prints_itself() -> None:
    text = str(big_plan()[1])
    assert "makespan" in text
    assert "x the bound" in text
    assert " -> n" in text
    assert "links more" in text


def test_names_say_how_an_engine_cuts() -> None:
    expected = {
        "model.layers.0.self_attn.q_proj.bias": 0,
        "model.layers.0.self_attn.o_proj.weight": 1,
        "model.layers.0.self_attn.o_proj.bias": None,
        "model.layers.0.input_layernorm.weight": None,
        "lm_head.weight": 0,
    }
    assert {name: cut_dimension(name) for name in expected} == expected


@given(st.data())
def test_equal_layouts_have_equal_digests_however_they_were_built(data: st.DataObject) -> None:
    source, _ = data.draw(transfers())
    again = Layout(source.tensors, source.placements)
    assert again.digest == source.digest
    assert again.holders == source.holders
    assert again.nbytes_by_holder == source.nbytes_by_holder
