"""The trainer's shell training on parts of a batch."""

import asyncio
from pathlib import Path

import pytest

from shared.errors import Conflict
from shared.ids import sample_id
from shared.runtime.audit import audit
from tests.unit.trainer.rank_responder import FREED_BYTES
from tests.unit.trainer.trainer_world import (
    GROUP,
    PROMPTS,
    WORLD_SIZE,
    batch,
    new_bus,
    scored,
    trainer,
    until,
)

RESPONSE_TOKENS = 3 * PROMPTS * GROUP


async def test_complete_prompts_are_trained_while_the_rest_is_awaited(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="eager") as world:
        first, second = batch(0)[:GROUP], batch(0)[GROUP:]
        await world.score(*first)
        await until(lambda: world.service.telemetry().batch_ready, "part")
        assert world.service.telemetry().collected == GROUP
        await world.shift("up")
        await until(lambda: "rest of the batch" in world.service.phase, "part")
        assert world.ranks.totals == [None]
        assert (world.service.activity, world.service.step, await world.rows()) == ("active", 0, [])
        with pytest.raises(Conflict, match="active"):
            await world.shift("down")
        await world.score(second[0])
        await asyncio.sleep(0.05)
        assert (world.ranks.totals, world.service.telemetry().collected) == ([None], GROUP + 1)

        await world.score(*second[1:])
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
        assert world.ranks.totals == [None, RESPONSE_TOKENS]
        assert [world.ranks.count(name) for name in ("save", "write")] == [1, 1]
        trained = sorted(s for _, _, share in world.ranks.trained for s in share)
        assert trained == sorted(s.trajectory.sample_id for s in batch(0))
        (row,) = await world.rows()
        assert (row.num_parts, row.num_samples, row.num_trained, row.grad_norm) == (2, 4, 4, 2.0)
        assert row.loss == pytest.approx(4 * 0.25 / RESPONSE_TOKENS)
        assert await world.waiting_scored() == []
        issued = [{"event": "issued", "sample": s.trajectory.sample_id} for s in batch(0)]
        assert audit(issued, world.journal(), prompts_per_step=PROMPTS).is_clean


async def test_bursts_lend_devices_between_parts_and_not_within_one(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="bursts") as world:
        gate = world.ranks.hold["train"] = asyncio.Event()
        await world.shift("up")
        await world.score(*batch(0)[:GROUP])
        await until(lambda: world.ranks.count("train") == 1, "part")
        with pytest.raises(Conflict, match="active"):
            await world.shift("down")
        gate.set()
        await until(lambda: world.service.activity == "done", "part")
        assert (await world.shift("down")).freed_bytes == WORLD_SIZE * FREED_BYTES
        assert (world.service.activity, world.service.phase) == ("idle", "waiting for the rest of the batch")
        await world.score(*batch(0)[GROUP:])
        await until(lambda: world.service.telemetry().batch_ready, "the rest")
        assert world.ranks.count("train") == 1
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.totals == [None, RESPONSE_TOKENS]


async def test_a_last_part_with_nothing_to_train_ends_the_step(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="eager") as world:
        await world.shift("up")
        await world.score(*batch(0)[:GROUP])
        await until(lambda: world.ranks.totals == [None], "part")
        await world.score(scored(1, 0, None), scored(1, 1, None))
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.totals == [None, 3 * GROUP]
        assert world.ranks.staged[0] == []


async def test_a_first_part_with_nothing_to_train_is_no_command(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="eager") as world:
        await world.shift("up")
        await world.score(scored(0, 0, None), scored(0, 1, None))
        await until(lambda: "rest of the batch" in world.service.phase, "part")
        await world.score(*batch(0)[GROUP:])
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.totals == [3 * GROUP]
        (row,) = await world.rows()
        assert (row.num_parts, row.num_trained, row.num_unscored) == (2, 2, 2)


async def test_ranks_lost_between_two_parts_train_the_batch_from_its_beginning(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="eager") as world:
        await world.shift("up")
        await world.score(*batch(0)[:GROUP])
        await until(lambda: world.ranks.totals == [None], "part")
        world.ranks.generation = "g2"
        await until(lambda: world.ranks.totals == [None, None], "the part again")
        await world.score(*batch(0)[GROUP:])
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.totals == [None, None, RESPONSE_TOKENS]
        assert world.ranks.loaded == ["", ""]
        trained = [s for _, _, share in world.ranks.trained for s in share]
        assert trained.count(sample_id(0, 0)) == 2  # the first time to no effect
        found = audit(
            [{"event": "issued", "sample": s.trajectory.sample_id} for s in batch(0)],
            world.journal(),
            prompts_per_step=PROMPTS,
        )
        assert (found.is_clean, found.trained) == (True, 4)


async def test_a_pause_lets_a_step_end_that_has_begun(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="eager") as world:
        await world.shift("up")
        await world.score(*batch(0)[:GROUP])
        await until(lambda: world.ranks.totals == [None], "part")
        world.service.set_paused(True)
        await world.score(*batch(0)[GROUP:], *batch(1))
        await until(lambda: world.service.activity == "done", "step")
        await asyncio.sleep(0.05)
        assert (world.service.step, world.service.telemetry().batch_ready) == (1, False)
        world.service.set_paused(False)
        await until(lambda: world.service.step == 2, "the next step")


async def test_late_streaming_begins_with_half_of_the_batch(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus(), streaming="late") as world:
        await world.shift("up")
        await world.score(*batch(0)[: GROUP - 1])
        await asyncio.sleep(0.05)
        assert (world.service.activity, world.service.telemetry().batch_ready) == ("done", False)
        await world.score(*batch(0)[GROUP - 1 : GROUP])
        await until(lambda: world.ranks.totals == [None], "part")
