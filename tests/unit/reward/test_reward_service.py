"""The reward service over a real role shell and replicas: each trajectory is scored once, whatever
happens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.reward import service as service_module
from services.reward.api import reward_router
from services.reward.service import RewardService
from shared.contracts.reward import ScoredSample
from shared.contracts.rollout import Trajectory
from shared.ids import Role, sample_id
from shared.inference.records import SequenceRecord
from shared.runtime.config import RunConfig
from shared.runtime.http import make_app
from shared.runtime.journal import Journal, read_journal
from tests.support.cluster import SimulatedCluster, cancel
from tests.support.text import ScriptedTokenizer

REWARD, R0 = Role.REWARD, "reward-0"


def trajectory(index: int = 0, k: int = 0, *, response: str = "Answer: 7", **more: Any) -> Trajectory:
    values: dict[str, Any] = {
        "sample_id": sample_id(index, k),
        "prompt_index": index,
        "group_size": 2,
        "prompt_token_ids": (1, 2),
        "response_token_ids": (3, 4),
        "logprobs": (-0.1, -0.2),
        "versions": ((0, 2),),
        "finish_reason": "stop",
        "prompt_text": "What is 3 + 4?",
        "response_text": response,
        "task": {"kind": "math", "answer": "7"},
    }
    return Trajectory(**{**values, **more})


class Bench:
    def __init__(self, house: SimulatedCluster, folder: Path, **reward: Any) -> None:
        self.house, self.folder = house, folder
        self.tokenizer = ScriptedTokenizer()
        config = {"max_new_tokens": 20, "attempts": 3, "deadline_s": 30.0, **reward}
        self.config = RunConfig.model_validate({"models": {"policy": "p", "genrm": "g"}, "reward": config})
        self.service = RewardService(
            self.config,
            self.tokenizer,  # type: ignore[arg-type]
            "pointwise",
            house.bus,
            house.subjects,
            house.clock,
            Journal(self.folder / "reward.jsonl"),
        )
        self.service.shell = house.shells[REWARD]
        house.shells[REWARD].describe = self.service.describe

    async def send(self, *trajectories: Trajectory) -> None:
        for one in trajectories:
            await self.house.bus.append(self.house.subjects.trajectory, one)

    async def scored(self) -> list[ScoredSample]:
        stream, subject = self.house.subjects.scored_stream, self.house.subjects.scored
        return [s.message for s in await self.house.bus.replay(stream, subject, ScoredSample)]

    async def waiting(self) -> int:
        stream, subject = self.house.subjects.trajectories_stream, self.house.subjects.trajectory
        return len(await self.house.bus.replay(stream, subject, Trajectory))

    async def until_scored(self, count: int) -> list[ScoredSample]:
        service = self.service
        await self.house.until(lambda: service.num_scored + service.num_unscored >= count)
        return sorted(await self.scored(), key=lambda s: s.trajectory.sample_id)


@asynccontextmanager
async def bench_of(folder: Path, *, starts: bool = True, **reward: Any) -> AsyncIterator[Bench]:
    house = SimulatedCluster(roles=(REWARD,))
    bench: list[Bench] = []

    async def on_finished(role: Role, record: SequenceRecord) -> None:
        await bench[0].service.on_finished(record)

    house.on_finished = on_finished
    async with house:
        bench.append(Bench(house, folder, **reward))
        service, tasks = bench[0].service, []
        if starts:
            tasks = [
                house.spawn(service.follow_trajectories(), "trajectories"),
                house.spawn(service.watch_deadlines(), "deadlines"),
            ]
        try:
            yield bench[0]
        finally:
            await cancel(*tasks)
            await bench[0].service.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "DEADLINE_LOOK_S", 0.05)


async def test_a_reward_is_what_verifier_and_genrm_say(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.house.shift_up(REWARD, R0)
        await bench.send(trajectory(0), trajectory(1, response="Answer: 9"))
        right, wrong = await bench.until_scored(2)
        assert (right.reward, right.verifiable_reward, right.genrm_reward) == (1.8, 1.0, 0.8)
        assert (wrong.reward, wrong.verifiable_reward, wrong.genrm_attempts) == (0.8, 0.0, 1)
        assert right.genrm_tokens == 20
        assert await bench.waiting() == 0
        assert bench.service.transcripts[-1]["score"] == 0.8
        assert bench.service.describe() == (0, 2, 2, "trajectories from rollout")


async def test_without_a_verdict_it_is_tried_again_then_unscored_and_counted(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        bench.tokenizer.says = lambda tokens: "no idea"
        await bench.house.shift_up(REWARD, R0)
        await bench.send(trajectory())
        (sample,) = await bench.until_scored(1)
        assert (sample.reward, sample.genrm_reward, sample.genrm_attempts) == (None, None, 3)
        assert sample.unscored_reason == "no verdict in 3 attempts"
        assert sample.genrm_tokens == 60
        assert bench.service.num_no_verdict == 3
        (entry,) = read_journal(tmp_path / "reward.jsonl")
        assert (entry["event"], entry["sample"]) == ("unscored", sample_id(0, 0))


async def test_a_verdict_in_the_last_attempt_counts(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        texts = ["no idea", "Score: 80", "Score: 5"]
        bench.tokenizer.says = lambda tokens: texts.pop(0)
        await bench.house.shift_up(REWARD, R0)
        await bench.send(trajectory())
        (sample,) = await bench.until_scored(1)
        assert (sample.genrm_reward, sample.genrm_attempts) == (0.5, 3)


async def test_beyond_its_deadline_a_sample_is_unscored(tmp_path: Path) -> None:
    async with bench_of(tmp_path, deadline_s=0.6) as bench:
        bench.house.replicas[R0].step_s = 0.2  # type: ignore[index]
        await bench.house.shift_up(REWARD, R0)
        await bench.send(trajectory())
        (sample,) = await bench.until_scored(1)
        assert sample.unscored_reason == "no verdict within 0.6 s"
        assert not bench.house.shells[REWARD].records


async def test_time_without_a_replica_does_not_count(tmp_path: Path) -> None:
    async with bench_of(tmp_path, deadline_s=1.0) as bench:
        await bench.send(*(trajectory(i) for i in range(4)))
        await bench.house.until(lambda: bench.service.num_received == 4)
        await asyncio.sleep(1.3)
        await bench.house.shift_up(REWARD, R0)
        assert [s.genrm_reward for s in await bench.until_scored(4)] == [0.8] * 4


async def test_a_failed_rollout_and_a_broken_task_are_unscored_with_the_reason(tmp_path: Path) -> None:
    failed = trajectory(0, finish_reason="failed", task={"kind": "math", "failed": "too long"})
    broken = trajectory(1, task={"kind": "poetry"})
    async with bench_of(tmp_path) as bench:
        await bench.send(failed, broken)
        first, second = await bench.until_scored(2)
        assert first.unscored_reason == "rollout failed: too long"
        assert "poetry" in (second.unscored_reason or "")


async def test_a_question_the_engine_refuses_is_unscored(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.house.shift_up(REWARD, R0)
        await bench.send(trajectory())
        await bench.house.until(lambda: bool(bench.service._cases))
        (case,) = bench.service._cases.values()
        await bench.service.on_failed(SequenceRecord("x", (), None, context=case), "no room")  # type: ignore[arg-type]
        (sample,) = await bench.until_scored(1)
        assert sample.unscored_reason == "GenRM sequence failed: no room"


async def test_a_trajectory_that_comes_twice_is_scored_once(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.send(trajectory(0), trajectory(0))
        await bench.house.until(lambda: bench.service.num_received == 1)
        await bench.house.shift_up(REWARD, R0)
        assert len(await bench.until_scored(1)) == 1
        await bench.send(trajectory(0))
        await bench.send(trajectory(1))
        await bench.house.until(lambda: bench.service.num_scored >= 2)
        samples = [s.trajectory.sample_id for s in await bench.scored()]
        assert sorted(samples) == [sample_id(0, 0), sample_id(1, 0)]


async def test_a_crash_between_storing_a_score_and_dropping_its_trajectory_repeats_nothing(
    tmp_path: Path,
) -> None:
    async with bench_of(tmp_path, starts=False) as bench:
        sample = ScoredSample(
            trajectory=trajectory(0),
            reward=1.0,
            verifiable_reward=1.0,
            genrm_reward=0.0,
            genrm_attempts=1,
            genrm_tokens=5,
        )
        await bench.house.bus.append(bench.house.subjects.scored, sample, dedupe_id="scored/x")
        await bench.send(trajectory(0), trajectory(1))
        service = bench.service
        follow = bench.house.spawn(service.follow_trajectories(), "second life")
        await bench.house.shift_up(REWARD, R0)
        await bench.house.until(lambda: service.num_scored == 1)
        assert [s.trajectory.prompt_index for s in await bench.scored()] == [0, 1]
        assert await bench.waiting() == 0
        await cancel(follow)


async def test_a_score_on_demand(tmp_path: Path) -> None:
    async with bench_of(tmp_path, deadline_s=2.0) as bench:
        await bench.house.shift_up(REWARD, R0)
        app = make_app("reward", token=None, routers=[reward_router(bench.service)], ready=lambda: None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://reward") as http:
            body = {"question": "What is 3 + 4?", "response": "7"}
            answers = await asyncio.gather(*(http.post("/v1/score", json=body) for _ in range(5)))
            assert [a.json()["score"] for a in answers] == [0.8] * 5
            assert answers[0].json() == {"score": 0.8, "reasoning": "Looks right.\nScore: 8", "tokens": 20}
            bench.tokenizer.says = lambda tokens: "no idea"
            assert (await http.post("/v1/score", json=body)).json()["score"] is None
            await bench.house.shift_down(REWARD, R0)
            late = (await http.post("/v1/score", json=body)).json()
            assert late == {"score": None, "reasoning": "", "tokens": 0}
            assert not bench.house.shells[REWARD].records
            assert (await http.post("/v1/score", json={"question": "x"})).status_code == 422


async def test_scores_survive_a_replica_that_dies(tmp_path: Path) -> None:
    def says(tokens: Sequence[int]) -> str:
        return f"Score: {tokens[0] % 11}" if tokens[0] % 3 else "no idea"

    async with bench_of(tmp_path) as bench:
        bench.tokenizer.says = says
        await bench.house.shift_up(REWARD, R0, "reward-1")
        await bench.send(*(trajectory(i) for i in range(20)))
        await bench.house.until(lambda: bench.house.tokens_on(R0) > 20)
        await bench.house.replicas[R0].kill()  # type: ignore[index]
        await bench.house.replicas[R0].start()  # type: ignore[index]
        samples = await bench.until_scored(20)
        assert [s.trajectory.prompt_index for s in samples] == list(range(20))
        assert all((s.reward is None) == (s.unscored_reason is not None) for s in samples)
