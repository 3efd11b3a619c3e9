"""Plans of Reads over several nodes, and what a membership change does to them."""

import pytest

from services.gps.plans import Plans
from shared.layout.tensor_layout import Box, TensorSpec
from shared.layout.transfer_plan import Link, NodeLinks

SPECS = {f"layers.{i}.w": TensorSpec(f"layers.{i}.w", "bfloat16", 2, (64, 16)) for i in range(4)}
TOTAL = sum(spec.nbytes for spec in SPECS.values())
LINKS = NodeLinks(Link(5e10), Link(1e10), {"rollout-0": "n0"})


async def test_whole_copies_are_read_from_the_own_node_first() -> None:
    plan = await Plans(("n0", "n1"), TOTAL, LINKS).for_read("policy", SPECS, "rollout-0", ())
    per_link = plan.explain().bytes_per_link
    assert sum(per_link.values()) == TOTAL
    assert per_link[("n0", "rollout-0")] >= 3 * TOTAL // 4


async def test_model_over_the_budget_is_sharded_and_read_from_the_whole_group() -> None:
    plans = Plans(("n0", "n1", "n2", "n3"), TOTAL // 2, LINKS)
    plan = await plans.for_read("policy", SPECS, "rollout-0", ())
    assert plan.explain().total_bytes == TOTAL
    assert {sender for sender, _ in plan.explain().bytes_per_link} >= {"n0", "n1"}


async def test_part_of_a_model_is_planned_by_its_boxes_and_cached() -> None:
    plans = Plans(("n0",), TOTAL, LINKS)
    parts = (("layers.1.w", Box((0, 0), (32, 16))),)
    plan = await plans.for_read("policy", SPECS, "rollout-0", parts)
    assert plan.explain().total_bytes == 32 * 16 * 2
    assert await plans.for_read("policy", SPECS, "rollout-0", parts) is plan
    assert await plans.for_read("policy", SPECS, "rollout-1", parts) is not plan


async def test_node_that_comes_starts_a_new_layout_epoch() -> None:
    plans = Plans(("n0",), TOTAL, LINKS)
    before = await plans.for_read("policy", SPECS, "rollout-0", ())
    plans.set_nodes(("n0",))
    assert plans.layout_epoch == 0
    plans.set_nodes(("n0", "n1"))
    after = await plans.for_read("policy", SPECS, "rollout-0", ())
    assert plans.layout_epoch == 1
    assert after.plan_id != before.plan_id
    plans.set_nodes(("n1",))
    assert plans.cache.plans() == () or all("n0" not in p.load_s_per_sender for _, p in plans.cache.plans())


async def test_model_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="exceeds the budget"):
        await Plans(("n0",), TOTAL - 1, LINKS).for_read("policy", SPECS, "r", ())
