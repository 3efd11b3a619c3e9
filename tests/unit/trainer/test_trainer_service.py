"""The trainer's shell against ranks that answer on the bus."""

import asyncio
from pathlib import Path

import pytest

from services.trainer import service as service_module
from services.trainer.rank_group import OFFLOADED, RankGroup
from shared.contracts.planner import DeviceLease
from shared.contracts.rank import RankStatus
from shared.errors import Conflict, DeadlineExceeded, PivotError
from shared.ids import sample_id
from shared.runtime.audit import audit
from shared.runtime.checkpoints import Checkpoint, Checkpoints
from shared.runtime.clock import SystemClock
from shared.runtime.topology import rank_devices
from tests.unit.trainer.rank_responder import FREED_BYTES, MOVED_BYTES
from tests.unit.trainer.trainer_world import (
    GROUP,
    PROMPTS,
    SUBJECTS,
    TRIES,
    WORLD_SIZE,
    batch,
    config,
    new_bus,
    scored,
    trainer,
    until,
)


async def test_a_fresh_start_loads_the_initial_policy_and_gives_the_devices_away(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        assert world.ranks.loaded == [""]
        assert world.ranks.count("offload") == 1
        assert (world.service.activity, world.service.holds_devices) == ("idle", False)


async def test_a_step_trains_saves_writes_journals_and_discards(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        await world.score(*batch(0))
        await until(lambda: world.service.telemetry().batch_ready, "batch")
        done = await world.shift("up")
        assert done.read_bytes == WORLD_SIZE * MOVED_BYTES
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
        commands = [name for rank, name in world.ranks.calls if rank == 0]
        assert commands == ["load", "offload", "reload", "stage", "train", "save", "write"]
        trained = sorted(s for _, _, share in world.ranks.trained for s in share)
        assert trained == sorted(s.trajectory.sample_id for s in batch(0))
        assert world.ranks.gps_version == 1
        assert Checkpoints(tmp_path).latest().step == 1
        assert await world.waiting_scored() == []
        (row,) = await world.rows()
        assert (row.step, row.num_samples, row.num_trained, row.num_unscored) == (1, 4, 4, 0)
        assert row.loss == pytest.approx(0.5 / 12)  # two ranks' sums over 4 samples of 3 tokens
        assert row.logprob_gap_mean == pytest.approx(1.0 / 12)
        assert row.logprob_gap_max == pytest.approx(0.2)
        assert row.clip_fraction == pytest.approx(2 / 12)
        assert row.num_parts == 1
        issued = [{"event": "issued", "sample": s.trajectory.sample_id} for s in batch(0)]
        assert audit(issued, world.journal(), prompts_per_step=PROMPTS).is_clean


async def test_training_goes_on_while_batches_are_ready_and_ends_after_the_last(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        for step in (1, 0, 2, 3):
            await world.score(*batch(step))
        await world.shift("up")
        await until(lambda: world.service.finished and world.service.activity == "done", "the end")
        assert world.service.step == 3
        assert [row.step for row in await world.rows()] == [1, 2, 3]
        assert not world.service.telemetry().batch_ready
        assert len(await world.waiting_scored()) == 4


async def test_unscored_empty_and_lonely_samples_are_masked_by_name(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        await world.score(scored(0, 0, None), scored(0, 1, 1.0), scored(1, 0, 0.0), scored(1, 1, 1.0))
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        trained = sorted(s for _, _, share in world.ranks.trained for s in share)
        assert trained == [sample_id(1, 0), sample_id(1, 1)]
        reasons = {e["sample"]: e["reason"] for e in world.journal() if e["event"] == "masked"}
        assert reasons == {sample_id(0, 0): "no verdict", sample_id(0, 1): "alone in its group"}


async def test_a_batch_with_nothing_to_train_is_a_step_all_the_same(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        await world.score(*(scored(p, k, None, tokens=0) for p in range(PROMPTS) for k in range(GROUP)))
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.trained == []
        assert world.ranks.gps_version == 1
        (row,) = await world.rows()
        assert (row.num_trained, row.num_unscored, row.staleness_max) == (0, 4, 0)


async def test_duplicates_are_ignored_and_discarded(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        await world.score(*batch(0)[:2], *batch(0)[:2], *batch(0)[1:])
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        await world.score(batch(0)[0])  # of a trained step
        await until(lambda: world.service.assembler.num_duplicates == 4, "duplicates")
        trained = [s for _, _, share in world.ranks.trained for s in share]
        assert sorted(trained) == sorted(s.trajectory.sample_id for s in batch(0))
        await asyncio.sleep(0.05)
        assert await world.waiting_scored() == []


async def test_devices_are_not_given_away_during_a_step(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        gate = world.ranks.hold["train"] = asyncio.Event()
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.ranks.count("train") == 1, "training")
        with pytest.raises(Conflict, match="active"):
            await world.shift("down")
        gate.set()
        await until(lambda: world.service.activity == "done", "step")
        assert (await world.shift("down")).freed_bytes == WORLD_SIZE * FREED_BYTES
        assert (world.service.activity, world.service.holds_devices) == ("idle", False)


async def test_shifts_that_change_nothing_move_nothing(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        assert (await world.shift("down")).freed_bytes == 0
        await world.shift("up")
        assert (await world.shift("up")).read_bytes == 0
        assert (world.ranks.count("reload"), world.service.activity) == (1, "done")
        await world.shift("down")
        assert (await world.shift("down")).freed_bytes == 0
        assert world.ranks.count("offload") == 2


async def test_a_shift_up_before_the_ranks_are_loaded_is_a_conflict(tmp_path: Path) -> None:
    bus, ranks = await new_bus()
    gate = ranks.hold["load"] = asyncio.Event()
    async with trainer(tmp_path, bus, ranks, wait=False) as world:
        with pytest.raises(Conflict, match="not ready"):
            await world.shift("up")
        gate.set()
        await until(lambda: world.service.activity == "idle", "load")
        await world.shift("up")


async def test_no_step_begins_after_a_shift_down_that_came_first(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        await world.shift("up")
        gate = world.ranks.hold["offload"] = asyncio.Event()
        down = asyncio.create_task(world.shift("down"))
        await until(lambda: world.ranks.count("offload") == 2, "offloading")
        await world.score(*batch(0))
        await until(lambda: world.service.assembler.is_ready(), "batch")
        gate.set()
        await down
        await asyncio.sleep(0.05)
        assert world.ranks.count("train") == 0
        assert world.service.activity == "idle"


async def test_ranks_lost_in_a_step_come_back_and_the_step_is_done_once(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.ranks.hold["train"] = asyncio.Event()
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.ranks.count("train") == 1, "training")
        world.ranks.generation = "g2"
        del world.ranks.hold["train"]
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
        assert world.ranks.loaded == ["", ""]
        assert world.service.holds_devices
        assert len(await world.rows()) == 1
        issued = [{"event": "issued", "sample": s.trajectory.sample_id} for s in batch(0)]
        found = audit(issued, world.journal(), prompts_per_step=PROMPTS)
        assert found.is_clean
        assert found.trained == 4


async def test_a_failed_command_starts_over_from_the_checkpoint(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.ranks.fail["save"] = 1
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.loaded == ["", ""]
        assert world.ranks.count("train") == 2
        assert len(await world.rows()) == 1


async def test_a_step_that_was_saved_but_not_written_is_written_after_the_loss(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.ranks.fail["write"] = 1
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.ranks.gps_version == 1 and world.service.activity == "done", "write")
        assert world.ranks.loaded == ["", "step-000001"]
        assert (world.ranks.count("train"), world.ranks.count("write")) == (1, 2)
        assert await world.waiting_scored() == []
        await world.score(*batch(1))
        await until(lambda: world.service.step == 2, "next step")


def node_lost() -> Conflict:
    return Conflict("Write w was aborted: node 1 was lost")


async def test_a_write_that_lost_a_node_is_tried_again_and_nothing_starts_over(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        first, second = asyncio.Event(), asyncio.Event()
        world.ranks.hold["write"] = first
        world.ranks.errors["write"] = [node_lost()]
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.ranks.count("write") == 1, "the first try")
        assert world.service.telemetry().phase == "writing the policy"
        world.ranks.hold["write"] = second
        first.set()
        await until(lambda: world.ranks.count("write") == 2, "the second try")
        assert world.service.telemetry().phase == "writing the policy, try 2"
        with pytest.raises(Conflict, match="active"):
            await world.shift("down")
        second.set()
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
        assert (world.ranks.loaded, world.ranks.count("train"), world.ranks.gps_version) == ([""], 1, 1)
        (again,) = [e for e in world.journal() if e["event"] == "write_retried"]
        assert (again["step"], again["try"], again["why"]) == (1, 2, node_lost().message)
        issued = [{"event": "issued", "sample": s.trajectory.sample_id} for s in batch(0)]
        assert audit(issued, world.journal(), prompts_per_step=PROMPTS).is_clean


async def test_a_node_may_be_lost_twice_in_one_write(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        late = DeadlineExceeded(role="rank-0", peer="gps", phase="commit write", deadline_s=180)
        world.ranks.errors["write"] = [node_lost(), late]
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        assert (world.ranks.loaded, world.ranks.count("write")) == ([""], 3)


async def test_a_commit_whose_answer_was_lost_is_a_written_policy(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.ranks.lost_answers["write"] = 1
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        assert (world.ranks.loaded, world.ranks.count("write"), world.ranks.gps_version) == ([""], 1, 1)
        assert not [e for e in world.journal() if e["event"] == "write_retried"]


async def test_a_node_that_never_comes_back_costs_a_start_over(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.ranks.errors["write"] = [node_lost() for _ in range(TRIES.most)]
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
        assert world.ranks.loaded == ["", "step-000001"]
        assert (world.ranks.count("train"), world.ranks.count("write")) == (1, TRIES.most + 1)


async def test_a_write_after_a_start_is_tried_again_too(tmp_path: Path) -> None:
    Checkpoints(tmp_path).commit(Checkpoint(1, "step-000001"))
    bus, ranks = await new_bus()
    ranks.errors["write"] = [node_lost()]
    async with trainer(tmp_path, bus, ranks) as world:
        assert (ranks.loaded, ranks.count("write"), ranks.gps_version) == (["step-000001"], 2, 1)
        assert world.service.step == 1


async def test_ranks_lost_between_two_tries_start_over(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.ranks.hold["write 1"] = asyncio.Event()
        world.ranks.errors["write"] = [node_lost()]
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.ranks.count("write") == 1, "the first try")
        del world.ranks.hold["write 1"]
        world.ranks.generation = "g2"
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
        assert world.ranks.loaded == ["", "step-000001"]


async def test_a_restarted_trainer_continues_where_the_checkpoint_is(tmp_path: Path) -> None:
    bus, ranks = await new_bus()
    async with trainer(tmp_path, bus, ranks) as world:
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.service.step == 1 and world.service.activity == "done", "step")
    ranks.phase = "on device"
    await bus.ensure_bucket(SUBJECTS.device_bucket)
    for device in rank_devices(config()):
        lease = DeviceLease(device=device, owner="training", epoch=1)
        await bus.kv_put(SUBJECTS.device_bucket, f"{device}", lease)
    async with trainer(tmp_path, bus, ranks) as world:
        assert world.ranks.loaded == ["", "step-000001"]
        assert (world.service.step, world.service.holds_devices) == (1, True)
        await world.score(*batch(1))
        await until(lambda: world.service.step == 2, "next step")


@pytest.mark.parametrize("phase", [OFFLOADED, "waiting for load"])
async def test_a_lease_of_old_does_not_give_devices_to_ranks_that_left_them(
    tmp_path: Path, phase: str
) -> None:
    bus, ranks = await new_bus()
    ranks.phase = phase
    await bus.ensure_bucket(SUBJECTS.device_bucket)
    for device in range(WORLD_SIZE):
        lease = DeviceLease(device=device, owner="training", epoch=1)
        await bus.kv_put(SUBJECTS.device_bucket, f"{device}", lease)
    async with trainer(tmp_path, bus, ranks) as world:
        assert not world.service.holds_devices


async def test_pause_lets_no_further_step_begin(tmp_path: Path) -> None:
    async with trainer(tmp_path, *await new_bus()) as world:
        world.service.set_paused(True)
        await world.score(*batch(0))
        await world.shift("up")
        await asyncio.sleep(0.05)
        assert (world.ranks.count("train"), world.service.telemetry().batch_ready) == (0, False)
        world.service.set_paused(False)
        await until(lambda: world.service.step == 1, "step")


async def test_long_shares_are_staged_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STAGE_PART_TOKENS", 6)
    async with trainer(tmp_path, *await new_bus()) as world:
        await world.score(*batch(0))
        await world.shift("up")
        await until(lambda: world.service.step == 1, "step")
        assert world.ranks.count("stage") == 2
        trained = sorted(s for _, _, share in world.ranks.trained for s in share)
        assert trained == sorted(s.trajectory.sample_id for s in batch(0))


async def test_silent_ranks_are_lost() -> None:
    bus, ranks = await new_bus()
    clock = SystemClock()
    group = RankGroup(WORLD_SIZE, bus, SUBJECTS, clock)
    await group.start()
    await ranks.report()
    await asyncio.wait_for(group.wait_all(), 5)
    assert set(group.phases()) == {0, 1}
    lost = asyncio.create_task(group.lost())
    await asyncio.sleep(0.01)
    assert not lost.done()
    ranks.generation = "g2"
    await ranks.report()
    await asyncio.wait_for(lost, 5)


async def test_ranks_of_two_generations_are_no_group() -> None:
    bus, ranks = await new_bus()
    group = RankGroup(WORLD_SIZE, bus, SUBJECTS, SystemClock())
    await group.start()
    for rank, generation in ((0, "g1"), (1, "g2")):
        status = RankStatus(
            rank=rank,
            world_size=WORLD_SIZE,
            incarnation=f"{generation}/{rank}",
            phase="",
            step=0,
            resident_bytes=0,
            pid=1,
        )
        await bus.publish(SUBJECTS.rank(rank, "status"), status)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(group.wait_all(), 0.1)
    await ranks.report()
    await asyncio.wait_for(group.wait_all(), 5)


async def test_an_error_of_one_rank_is_raised_as_its_own_class() -> None:
    bus, ranks = await new_bus()
    group = RankGroup(WORLD_SIZE, bus, SUBJECTS, SystemClock())
    ranks.fail["offload"] = 1
    from shared.contracts.rank import OffloadStates, RankMoved

    with pytest.raises(PivotError, match="rank 0 failed in offload"):
        await group.ask("offload", OffloadStates(), RankMoved, deadline_s=5)
