"""A trainer's shell over ranks that answer on the bus, for tests of its steps and shifts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.policy_write import Tries
from services.trainer.rank_group import RankGroup
from services.trainer.service import TrainerService
from shared.bus.memory_bus import MemoryBus
from shared.contracts.planner import ShiftDown, ShiftStepDone, ShiftUp
from shared.contracts.reward import ScoredSample
from shared.contracts.subjects import Subjects
from shared.contracts.trainer import StepCompleted
from shared.ids import Role
from shared.runtime.checkpoints import Checkpoints
from shared.runtime.clock import SystemClock
from shared.runtime.config import RunConfig
from shared.runtime.journal import Journal, read_journal
from tests.support.samples import scored_sample
from tests.unit.trainer.rank_responder import RankResponders

PROMPTS, GROUP, WORLD_SIZE = 2, 2, 2
TRIES = Tries(most=3, first_pause_s=0.01)
SUBJECTS = Subjects("test")


def config(streaming: str = "off") -> RunConfig:
    return RunConfig.model_validate(
        {
            "models": {"policy": "p", "genrm": "g"},
            "cluster": {"devices": WORLD_SIZE + 1, "split": {"training": WORLD_SIZE}},
            "rollout": {"samples_per_prompt": GROUP},
            "training": {"prompts_per_step": PROMPTS, "steps": 3, "streaming": streaming},
        }
    )


def scored(prompt: int, sample: int, reward: float | None, *, tokens: int = 3) -> ScoredSample:
    return scored_sample(prompt, sample, reward, group_size=GROUP, num_tokens=tokens)


def batch(step: int) -> list[ScoredSample]:
    first = step * PROMPTS
    return [scored(p, k, float(k)) for p in range(first, first + PROMPTS) for k in range(GROUP)]


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came: {what}")


@dataclass(slots=True)
class World:
    """One life of the trainer over a bus and a run folder that may outlive it."""

    bus: MemoryBus
    ranks: RankResponders
    service: TrainerService
    folder: Path

    async def score(self, *samples: ScoredSample) -> None:
        for sample in samples:
            await self.bus.append(SUBJECTS.scored, sample)

    async def shift(self, direction: str) -> ShiftStepDone:
        kind = ShiftUp if direction == "up" else ShiftDown
        return await self.bus.request(
            SUBJECTS.shift(Role.TRAINING, direction),
            kind(shift_id="s", role=Role.TRAINING, deadline_s=10),
            ShiftStepDone,
            deadline_s=5,
            role="test",
            peer="trainer",
            phase=direction,
        )

    async def rows(self) -> list[StepCompleted]:
        stored = await self.bus.replay(SUBJECTS.training_stream, SUBJECTS.step_completed, StepCompleted)
        return [s.message for s in stored]

    async def waiting_scored(self) -> list[str]:
        stored = await self.bus.replay(SUBJECTS.scored_stream, SUBJECTS.scored, ScoredSample)
        return [s.message.trajectory.sample_id for s in stored]

    def journal(self) -> list[dict[str, Any]]:
        return list(read_journal(self.folder / "trainer.jsonl"))


async def new_bus() -> tuple[MemoryBus, RankResponders]:
    bus = MemoryBus()
    for spec in SUBJECTS.streams:
        await bus.ensure_stream(spec)
    ranks = RankResponders(bus, SUBJECTS, WORLD_SIZE)
    await ranks.start()
    return bus, ranks


@contextlib.asynccontextmanager
async def trainer(
    folder: Path, bus: MemoryBus, ranks: RankResponders, *, wait: bool = True, streaming: str = "off"
) -> AsyncIterator[World]:
    clock = SystemClock()
    group = RankGroup(WORLD_SIZE, bus, SUBJECTS, clock)
    journal = Journal(folder / "trainer.jsonl")

    async def gps_version() -> int:
        return ranks.gps_version

    service = TrainerService(
        config(streaming), group, Checkpoints(folder), journal, gps_version, bus, SUBJECTS, clock, TRIES
    )
    await service.start()
    tasks = [asyncio.create_task(work) for work in (service.run_for_ever(), service.follow_scored())]

    async def heartbeat() -> None:
        while True:
            await ranks.report()
            await asyncio.sleep(0.01)

    tasks.append(asyncio.create_task(heartbeat()))
    try:
        if wait:
            await until(lambda: service.activity != "starting", "start")
        yield World(bus, ranks, service, folder)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        journal.close()
