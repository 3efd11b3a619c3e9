"""A rank's shell with an engine of numpy arrays; Reads of GPS see one buffer, Writes fill another."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from services.trainer.lane import Lane
from services.trainer.ports import StepStats
from services.trainer.rank_group import AWAITS_LOAD, OFFLOADED
from services.trainer.rank_shell import RankShell
from shared.bus.memory_bus import MemoryBus
from shared.contracts.base import Done, Message
from shared.contracts.gps import (
    PoolTensor,
    PoolView,
    ReadGrant,
    ReadRequest,
    TensorBox,
    WriteCommit,
    WriteGrant,
    WriteRequest,
    WriteStatus,
)
from shared.contracts.rank import (
    CheckpointSaved,
    LoadCheckpoint,
    OffloadStates,
    RankMoved,
    RankStatus,
    RankStepped,
    RankWrote,
    ReloadStates,
    SaveCheckpoint,
    StageSamples,
    TrainSample,
    TrainStep,
    WritePolicy,
)
from shared.contracts.subjects import Subjects
from shared.errors import BusError, Conflict, EngineError, NotFound, PivotError
from shared.runtime.clock import SystemClock
from shared.weights.checksum import checksum_bytes
from shared.weights.host_pool import HostPool, MappedPool

SUBJECTS = Subjects("test")
ELEMENTS = 8


class ArrayEngine:
    """Half of an 8-element tensor; a step adds the number of samples to it."""

    def __init__(self) -> None:
        self.weights = np.zeros(ELEMENTS // 2, np.float32)
        self.saved: dict[str, tuple[int, np.ndarray]] = {}
        self.is_built = self.is_offloaded = False
        self.step = 0
        self.tag: str | None = None
        self.broken = False
        self.closed = False
        self.threads: set[str] = set()
        self.gate: threading.Event | None = None
        self.micro_batches: list[int] = []

    def _enter(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(5)
        if self.broken:
            raise RuntimeError("collective failed")

    def build(self, pool: MappedPool) -> None:
        self._enter()
        self.weights = pool.array("w")[: ELEMENTS // 2].copy()
        self.is_built, self.step, self.tag = True, 0, ""

    def load(self, tag: str) -> None:
        self._enter()
        if tag not in self.saved:
            raise NotFound(f"no checkpoint {tag}")
        self.step, weights = self.saved[tag]
        self.weights, self.tag = weights.copy(), tag

    def save(self, tag: str) -> None:
        self._enter()
        self.saved[tag], self.tag = (self.step, self.weights.copy()), tag

    def train(
        self,
        step: int,
        samples: Sequence[TrainSample],
        total_response_tokens: int | None,
        num_micro_batches: int,
    ) -> StepStats:
        self._enter()
        self.weights += len(samples)
        self.tag = None
        if total_response_tokens is not None:
            self.step = step + 1
        self.micro_batches.append(num_micro_batches)
        return StepStats(0.5, 1.0, 40, 20, 0.1, 0.2, 1.5, 3)

    def offload(self) -> int:
        self._enter()
        self.is_offloaded = True
        return 100

    def reload(self) -> int:
        self._enter()
        self.is_offloaded = False
        return 100

    def shard_boxes(self) -> tuple[TensorBox, ...]:
        return (TensorBox(tensor="w", flat_start=0, flat_count=ELEMENTS // 2),)

    def copy_shard(self, pool: MappedPool) -> tuple[str, ...]:
        self._enter()
        pool.array("w")[: ELEMENTS // 2] = self.weights
        return (checksum_bytes(self.weights.tobytes()),)

    def resident_bytes(self) -> int:
        return 4096

    def close(self) -> None:
        self.closed = True


class OneBufferGps:
    """What a rank calls of GPS."""

    def __init__(self, pool: HostPool) -> None:
        tensors = (PoolTensor(name="w", dtype="float32", shape=(ELEMENTS,), offset_bytes=0),)
        self.regions = [pool.create("policy", name, ELEMENTS * 4) for name in ("a", "b")]
        self.views = [PoolView(path=str(r.path), nbytes=ELEMENTS * 4, tensors=tensors) for r in self.regions]
        self.regions[0].memory.view(np.float32)[:] = 7
        self.version = 0
        self.requests: list[Message] = []
        self.lost: PivotError | None = None
        """What the next commit answers: of a GPS that was restarted since the Write began."""

    @contextlib.asynccontextmanager
    async def read(self, request: ReadRequest) -> AsyncIterator[ReadGrant]:
        self.requests.append(request)
        yield ReadGrant(
            model=request.model,
            version=self.version,
            lease_id="l",
            view=self.views[0],
            plan_id="p",
            nbytes=ELEMENTS * 4,
        )

    async def begin_write(self, request: WriteRequest) -> WriteGrant:
        if request.version <= self.version:
            raise Conflict("not newer")
        self.requests.append(request)
        return WriteGrant(write_id="w1", model="policy", version=request.version, view=self.views[1])

    async def commit_write(self, write_id: str, commit: WriteCommit) -> WriteStatus:
        self.requests.append(commit)
        if self.lost is not None:
            lost, self.lost = self.lost, None
            raise lost
        return WriteStatus(write_id=write_id, version=1, committed=False, pending_writers=("rank-1",))


class House:
    def __init__(self, pool: HostPool) -> None:
        self.bus = MemoryBus()
        self.engine = ArrayEngine()
        self.gps = OneBufferGps(pool)
        self.failures: list[PivotError] = []
        self.lane = Lane("engine under test")
        self.shell = RankShell(
            rank=0,
            world_size=2,
            incarnation="g1/0",
            backend=self.engine,
            lane=self.lane,
            gps=self.gps,  # type: ignore[arg-type]
            bus=self.bus,
            subjects=SUBJECTS,
            clock=SystemClock(),
            on_broken=self.failures.append,
        )

    async def ask(self, command: str, message: Message, reply: type[Any]) -> Any:
        return await self.bus.request(
            SUBJECTS.rank(0, command),
            message,
            reply,
            deadline_s=5,
            role="test",
            peer="rank 0",
            phase=command,
        )


@pytest.fixture
async def house() -> AsyncIterator[House]:
    pool = HostPool(run=f"t{uuid4().hex[:8]}", node=0, budget_bytes=1 << 20)
    house = House(pool)
    await house.shell.serve()
    yield house
    pool.close()


def sample(index: int) -> TrainSample:
    return TrainSample(
        sample_id=f"{index:08d}.00",
        prompt_token_ids=(1,),
        response_token_ids=(2,),
        logprobs=(-1.0,),
        versions=((0, 1),),
        advantage=1.0,
    )


def part(step: int, number: int, of: int, *indices: int) -> StageSamples:
    return StageSamples(step=step, part=number, num_parts=of, samples=tuple(map(sample, indices)))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never came")


STEP = TrainStep(step=0, total_response_tokens=40, num_micro_batches=3)


async def test_a_life(house: House) -> None:
    assert house.shell.status().phase == AWAITS_LOAD
    loaded = await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    assert (loaded.step, loaded.incarnation, loaded.world_size) == (0, "g1/0", 2)
    assert list(house.engine.weights) == [7] * 4
    await house.ask("stage", part(0, 0, 2, 1, 2), Done)
    await house.ask("stage", part(0, 1, 2, 3), Done)
    await house.ask("stage", part(0, 1, 2, 3), Done)  # what the trainer repeats while others have more parts
    stepped = await house.ask("train", STEP, RankStepped)
    assert (stepped.step, stepped.loss_sum, stepped.clipped_tokens) == (0, 0.5, 3)
    assert list(house.engine.weights) == [10] * 4
    assert house.engine.micro_batches == [3]
    saved = await house.ask("save", SaveCheckpoint(tag="step-000001"), CheckpointSaved)
    assert saved.tag == "step-000001"
    wrote = await house.ask("write", WritePolicy(version=1), RankWrote)
    assert (wrote.nbytes, wrote.committed) == (16, False)
    assert list(house.gps.regions[1].memory.view(np.float32)[:4]) == [10] * 4
    begun = next(r for r in house.gps.requests if isinstance(r, WriteRequest))
    assert (begun.writers, begun.attempt) == (("rank-0", "rank-1"), "g1")
    moved = await house.ask("offload", OffloadStates(), RankMoved)
    assert (moved.moved_bytes, moved.resident_bytes) == (100, 4096)
    assert house.shell.status().phase == OFFLOADED
    await house.ask("reload", ReloadStates(), RankMoved)
    assert house.engine.threads == {"engine under test"}
    assert house.failures == []


async def test_loading_what_is_there_leaves_the_states_where_they_are(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    await house.ask("offload", OffloadStates(), RankMoved)
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    assert house.engine.is_offloaded
    assert len(house.gps.requests) == 1


async def test_loading_a_checkpoint_undoes_a_step(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    await house.ask("save", SaveCheckpoint(tag="a"), CheckpointSaved)
    await house.ask("stage", part(0, 0, 1, 1), Done)
    await house.ask("train", STEP, RankStepped)
    loaded = await house.ask("load", LoadCheckpoint(tag="a"), RankStatus)
    assert loaded.step == 0
    assert list(house.engine.weights) == [7] * 4


async def test_a_run_that_begins_refuses_a_later_policy(house: House) -> None:
    house.gps.version = 3
    with pytest.raises(NotFound, match="version 3"):
        await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    house.engine.saved["step-000003"] = (3, np.ones(4, np.float32))
    loaded = await house.ask("load", LoadCheckpoint(tag="step-000003"), RankStatus)
    assert loaded.step == 3


async def test_a_missing_checkpoint_is_the_callers_error(house: House) -> None:
    with pytest.raises(NotFound):
        await house.ask("load", LoadCheckpoint(tag="gone"), RankStatus)
    await asyncio.sleep(0.01)
    assert house.failures == []


async def test_training_needs_a_model_and_every_part(house: House) -> None:
    with pytest.raises(NotFound, match="load one first"):
        await house.ask("train", STEP, RankStepped)
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    with pytest.raises(Conflict, match="not staged"):
        await house.ask("train", STEP, RankStepped)
    await house.ask("stage", part(0, 1, 2, 1), Done)
    with pytest.raises(Conflict, match="not staged"):
        await house.ask("train", STEP, RankStepped)


async def test_staging_again_replaces(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    await house.ask("stage", part(0, 1, 2, 1, 2, 3), Done)
    await house.ask("stage", part(0, 0, 1, 4), Done)
    await house.ask("train", STEP, RankStepped)
    assert list(house.engine.weights) == [8] * 4


async def test_a_step_is_not_trained_twice(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    await house.ask("stage", part(0, 0, 1, 1), Done)
    await house.ask("train", STEP, RankStepped)
    with pytest.raises(Conflict, match="is trained"):
        await house.ask("train", STEP, RankStepped)


async def test_an_engine_failure_is_answered_and_ends_the_life(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.rank_shell.ANSWER_GRACE_S", 0.0)
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    house.engine.broken = True
    with pytest.raises(
        EngineError, match="rank 0 failed in offload: RuntimeError: collective failed"
    ) as caught:
        await house.ask("offload", OffloadStates(), RankMoved)
    assert caught.value.data["phase"] == "offload"
    await asyncio.sleep(0.01)
    assert [f.message for f in house.failures] == [caught.value.message]


async def test_a_refused_write_ends_nothing(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    with pytest.raises(Conflict):
        await house.ask("write", WritePolicy(version=0), RankWrote)
    await house.ask("write", WritePolicy(version=1), RankWrote)
    assert house.failures == []


@pytest.mark.parametrize(
    "lost", [NotFound("no Write w1 is open here"), BusError("not known whether it was committed")]
)
async def test_a_write_that_gps_forgot_may_be_tried_again(house: House, lost: PivotError) -> None:
    """Answered as a conflict: what is not found may be the rank's own mistake, which no new try mends."""
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    house.gps.lost = lost
    with pytest.raises(Conflict, match=f"Write of version 1 broke off: {lost.message}"):
        await house.ask("write", WritePolicy(version=1), RankWrote)
    await house.ask("write", WritePolicy(version=1), RankWrote)
    assert house.failures == []


async def test_a_pool_file_that_is_gone_breaks_the_write_off(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    house.gps.regions[1].path.unlink()
    with pytest.raises(Conflict, match="is gone"):
        await house.ask("write", WritePolicy(version=1), RankWrote)


async def test_the_heart_beats_during_a_step(house: House) -> None:
    seen: list[RankStatus] = []

    async def on_status(message: Message) -> None:
        assert isinstance(message, RankStatus)
        seen.append(message)

    await house.bus.subscribe(SUBJECTS.rank(0, "status"), on_status)
    beating = asyncio.create_task(house.shell.report_for_ever())
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    await house.ask("stage", part(0, 0, 1, 1), Done)
    house.engine.gate = threading.Event()
    training = asyncio.create_task(house.ask("train", STEP, RankStepped))
    await until(lambda: any(status.phase == "training" for status in seen))
    assert not house.lane.is_idle
    house.engine.gate.set()
    await training
    await until(lambda: seen[-1].phase == "on device")
    assert seen[-1].step == 1
    assert house.lane.is_idle
    beating.cancel()


async def test_commands_run_one_at_a_time_in_order(house: House) -> None:
    await house.ask("load", LoadCheckpoint(tag=""), RankStatus)
    house.engine.gate = threading.Event()
    down = asyncio.create_task(house.ask("offload", OffloadStates(), RankMoved))
    await asyncio.sleep(0.01)
    up = asyncio.create_task(house.ask("reload", ReloadStates(), RankMoved))
    await asyncio.sleep(0.05)
    assert not down.done()
    assert not up.done()
    house.engine.gate.set()
    await asyncio.gather(down, up)
    assert not house.engine.is_offloaded
