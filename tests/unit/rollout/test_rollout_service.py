"""The rollout service over a real role shell: issues within the bound, hands each sample on once, also
after restarts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.rollout.dataset import Prompt
from services.rollout.service import RolloutService
from shared.contracts.gps import PolicyVersion
from shared.contracts.reward import ScoredSample
from shared.contracts.rollout import Trajectory
from shared.ids import Role, sample_id
from shared.inference.records import SequenceRecord
from shared.runtime.config import RunConfig
from shared.runtime.journal import Journal, read_journal
from tests.support.cluster import SimulatedCluster, cancel
from tests.support.text import ScriptedTokenizer

ROLLOUT, R0 = Role.ROLLOUT, "rollout-0"
PROMPTS, SAMPLES = 2, 4
BATCH = PROMPTS * SAMPLES


class Source:
    def prompt(self, index: int) -> Prompt:
        question = f"What is {index} + 1?"
        task = {"kind": "math", "answer": str(index + 1)}
        return Prompt(({"role": "user", "content": question},), question, task)


class Bench:
    """The service's process can be stopped and started; bus, replicas and journal stay."""

    def __init__(self, house: SimulatedCluster, folder: Path, **values: Any) -> None:
        self.house, self.path = house, folder / "rollout.jsonl"
        self.config = RunConfig.model_validate(
            {
                "models": {"policy": "p", "genrm": "g"},
                "rollout": {"samples_per_prompt": SAMPLES, "max_new_tokens": 30},
                "training": {"steps": 5, "prompts_per_step": PROMPTS, "staleness": 1},
                **values,
            }
        )
        self.service: RolloutService
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, version: int = 0) -> int:
        """Gives the number of sequences that are run again."""
        house = self.house
        issued = [entry["sample"] for entry in read_journal(self.path)]
        tokenizer: Any = ScriptedTokenizer(lambda tokens: f"{len(tokens)} tokens")
        self.service = RolloutService(
            self.config, Source(), tokenizer, house.bus, house.subjects, Journal(self.path)
        )
        if ROLLOUT not in house.shells:
            await house.start_shell(ROLLOUT, [])
        self.service.shell = house.shells[ROLLOUT]
        again = await self.service.recover(issued, version)
        self.tasks = [house.spawn(self.service.issue_for_ever(), "issue")]
        return again

    async def stop(self) -> None:
        await cancel(*self.tasks)
        await self.house.stop_shell(ROLLOUT)
        del self.house.shells[ROLLOUT]

    async def flip(self, version: int) -> None:
        self.house.weights[ROLLOUT].version = version
        message = PolicyVersion(model="policy", version=version, layout_epoch=1, checksum="c")
        await self.service.on_version(message)

    async def trajectories(self) -> list[Trajectory]:
        stream, subject = self.house.subjects.trajectories_stream, self.house.subjects.trajectory
        return [s.message for s in await self.house.bus.replay(stream, subject, Trajectory)]

    def issued(self) -> list[str]:
        return [entry["sample"] for entry in read_journal(self.path)]

    async def until_finished(self, count: int) -> None:
        await self.house.until(lambda: self.service.num_finished >= count)


@asynccontextmanager
async def bench_of(folder: Path, **values: Any) -> AsyncIterator[Bench]:
    house = SimulatedCluster(roles=(ROLLOUT,))
    bench: list[Bench] = []

    async def on_finished(role: Role, record: SequenceRecord) -> None:
        await bench[0].service.on_finished(record)

    house.on_finished = on_finished
    async with house:
        bench.append(Bench(house, folder, **values))
        try:
            yield bench[0]
        finally:
            await cancel(*bench[0].tasks)


def names(num_prompts: int, first: int = 0) -> list[str]:
    return [sample_id(p, k) for p in range(first, num_prompts) for k in range(SAMPLES)]


async def test_whole_groups_are_issued_up_to_the_staleness_bound(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.start()
        await bench.house.until(lambda: bench.service.num_issued == 2 * BATCH)
        assert bench.issued() == names(2 * PROMPTS)
        assert "policy version 1 (staleness bound 1)" in bench.service.describe()[3]
        await bench.flip(1)
        await bench.house.until(lambda: bench.service.num_issued == 3 * BATCH)
        await bench.flip(1)
        await bench.flip(4)
        await bench.house.until(lambda: bench.service.num_issued == 5 * BATCH)
        assert bench.issued() == names(5 * PROMPTS)
        assert bench.service.describe()[3] == "every sample of the run is issued"


async def test_another_models_version_issues_nothing(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.start()
        message = PolicyVersion(model="genrm", version=9, layout_epoch=1, checksum="c")
        await bench.service.on_version(message)
        assert bench.service.version == 0


async def test_a_trajectory_holds_what_reward_and_training_need(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.start()
        await bench.house.shift_up(ROLLOUT, R0)
        await bench.until_finished(2 * BATCH)
        found = {t.sample_id: t for t in await bench.trajectories()}
        assert sorted(found) == names(2 * PROMPTS)
        one = found[sample_id(3, 2)]
        assert (one.prompt_index, one.group_size, one.prompt_text) == (3, SAMPLES, "What is 3 + 1?")
        assert one.task == {"kind": "math", "answer": "4"}
        assert len(one.response_token_ids) == len(one.logprobs) == 30
        assert (one.versions, one.finish_reason, one.response_text) == (((0, 30),), "length", "30 tokens")


async def test_samples_of_a_group_have_their_own_seeds_and_the_same_ones_next_time(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.start()
        group = bench.service.group_records(3)
        seeds = [record.sampling.seed for record in group]
        assert len(set(seeds)) == SAMPLES
        assert [record.sampling.seed for record in bench.service.group_records(3)] == seeds
        assert [record.sampling.seed for record in bench.service.group_records(4)] != seeds


async def test_a_long_prompt_is_cut_to_its_end_and_counted(tmp_path: Path) -> None:
    rollout = {"samples_per_prompt": SAMPLES, "max_prompt_tokens": 8}
    async with bench_of(tmp_path, rollout=rollout) as bench:
        await bench.start()
        (first, *_) = bench.service.group_records(12)
        assert "".join(map(chr, first.prompt_token_ids)) == "12 + 1?"[-8:].rjust(8)
        assert bench.service.num_skipped > 0


async def test_new_samples_start_with_the_version_they_are_issued_under(tmp_path: Path) -> None:
    """Otherwise their oldest token could be staler than the bound."""
    async with bench_of(tmp_path) as bench:
        await bench.start()
        await bench.house.shift_up(ROLLOUT, R0, "rollout-1")
        await bench.until_finished(2 * BATCH)
        for version in (1, 2, 3):
            await bench.flip(version)
            await bench.until_finished((2 + version) * BATCH)
        for trajectory in await bench.trajectories():
            batch = trajectory.prompt_index // PROMPTS
            assert batch - trajectory.oldest_version <= bench.config.training.staleness


async def test_a_sample_the_engine_refuses_completes_its_group_as_failed(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.start()
        record = bench.service.group_records(0)[1]
        await bench.service.on_failed(record, "too long")
        (failed,) = await bench.trajectories()
        assert (failed.sample_id, failed.finish_reason, failed.response_token_ids) == (
            sample_id(0, 1),
            "failed",
            (),
        )
        assert failed.task["failed"] == "too long"
        assert failed.oldest_version == 0
        assert bench.service.num_finished == 1


# Restarts


async def test_a_restart_issues_nothing_twice_and_runs_only_what_is_not_done(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.start()
        await bench.house.shift_up(ROLLOUT, R0)
        await bench.until_finished(3)
        await bench.stop()
        done = {t.sample_id for t in await bench.trajectories()}
        generated = dict(bench.house.generated())
        again = await bench.start()
        assert again == 2 * BATCH - len(done)
        await bench.house.lease(R0)
        await bench.house.until(lambda: bench.service.num_issued == 2 * BATCH)
        await bench.house.until(lambda: not bench.house.replicas[R0].is_awake)  # type: ignore[index]
        await bench.house.shift_up(ROLLOUT, R0)
        await bench.until_finished(2 * BATCH)
        found = [t.sample_id for t in await bench.trajectories()]
        assert sorted(found) == names(2 * PROMPTS)
        assert bench.issued() == names(2 * PROMPTS)
        counts = bench.house.generated()
        assert all(counts[key] == count for key, count in generated.items() if key[0] in done)


async def test_scored_and_trained_samples_are_not_run_again(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        bus, subjects = bench.house.bus, bench.house.subjects
        journal = Journal(bench.path)
        journal.append(*({"event": "issued", "sample": s, "version": 0} for s in names(2 * PROMPTS)))
        trajectory = Trajectory(
            sample_id=sample_id(2, 1),
            prompt_index=2,
            group_size=SAMPLES,
            prompt_token_ids=(1,),
            response_token_ids=(2,),
            logprobs=(-1.0,),
            versions=((0, 1),),
            finish_reason="stop",
            prompt_text="",
            response_text="",
            task={},
        )
        scored = ScoredSample(
            trajectory=trajectory,
            reward=None,
            verifiable_reward=0.0,
            genrm_reward=None,
            genrm_attempts=1,
            genrm_tokens=1,
        )
        await bus.append(subjects.scored, scored)
        again = await bench.start(version=1)
        assert again == BATCH - 1
        assert sorted(bench.house.shells[ROLLOUT].records)[0] == sample_id(2, 0)
        assert sample_id(2, 1) not in bench.house.shells[ROLLOUT].records
        await bench.house.until(lambda: bench.service.num_issued == 3 * BATCH)
        assert bench.issued() == names(3 * PROMPTS)


async def test_a_group_whose_lines_were_torn_is_whole_again(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        journal = Journal(bench.path)
        journal.append({"event": "issued", "sample": sample_id(0, 0), "version": 0})
        assert await bench.start() == SAMPLES
        await bench.house.until(lambda: bench.service.num_issued == 2 * BATCH)
        assert sorted(bench.issued()) == names(2 * PROMPTS)


@pytest.mark.parametrize("policy", ["pivot", "colocated"])
async def test_colocated_is_synchronous(tmp_path: Path, policy: str) -> None:
    async with bench_of(tmp_path, policy=policy) as bench:
        await bench.start()
        expected = (1 if policy == "colocated" else 2) * BATCH
        await bench.house.until(lambda: bench.service.num_issued == expected)
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.service.num_issued == expected
