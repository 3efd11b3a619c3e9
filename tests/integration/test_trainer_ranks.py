"""Two real rank processes (DeepSpeed ZeRO-3 over gloo) beside a real GPS and a real NATS server."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from services.trainer.packing import share_out
from services.trainer.policy_write import PolicyWriter, Tries
from services.trainer.rank_group import RankGroup
from shared.bus.embedded_nats import server_binary, write_server_config
from shared.bus.nats_bus import connect
from shared.bus.ports import Bus
from shared.contracts.base import Done
from shared.contracts.gps import ReadRequest
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
from shared.runtime.clock import SystemClock
from shared.runtime.config import RunConfig
from shared.runtime.run_folder import KERNEL_CACHE, Endpoints, RunFolder, choose_endpoints
from shared.runtime.supervisor import ProcessSpec, Supervisor
from shared.weights.gps_client import GpsClient
from shared.weights.host_pool import map_view
from tests.support.tiny_model import TinySpec, write_model

REPOSITORY = Path(__file__).parents[2]
EXTENSIONS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", KERNEL_CACHE)).resolve()
WORLD_SIZE = 2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@dataclass(slots=True)
class Ranks:
    """A running set of processes, and the trainer's way to them."""

    folder: RunFolder
    config: RunConfig
    endpoints: Endpoints
    supervisor: Supervisor
    bus: Bus
    group: RankGroup
    gps: GpsClient
    seconds: dict[str, float] = field(default_factory=dict)

    async def ask(self, command: str, messages: Any, reply: type[Any]) -> list[Any]:
        started = time.monotonic()
        answers = await self.group.ask(command, messages, reply, deadline_s=300)
        self.seconds[command] = time.monotonic() - started
        return answers

    async def train(self, step: int, samples: Sequence[TrainSample]) -> list[RankStepped]:
        return await self.train_part(step, samples, num_response_tokens(samples))

    async def train_part(
        self, step: int, samples: Sequence[TrainSample], total: int | None
    ) -> list[RankStepped]:
        shares = share_out(samples, WORLD_SIZE, self.config.training.micro_batch_tokens)
        staged = [StageSamples(step=step, part=0, num_parts=1, samples=s) for s in shares.samples]
        await self.ask("stage", staged, Done)
        command = TrainStep(
            step=step, total_response_tokens=total, num_micro_batches=shares.num_micro_batches
        )
        return await self.ask("train", command, RankStepped)

    async def policy(self) -> tuple[int, dict[str, np.ndarray]]:
        """Version and weights as GPS holds them."""
        async with self.gps.read(ReadRequest(model="policy", receiver="test")) as grant:
            pool = map_view(grant.view)
            return grant.version, {name: pool.array(name).copy() for name in pool.names}


@contextlib.asynccontextmanager
async def running(path: Path, model: Path, **training: Any) -> AsyncIterator[Ranks]:
    run = f"t{secrets.token_hex(4)}"
    config = RunConfig.model_validate(
        {
            "run": {"name": run, "folder": str(path)},
            "models": {"policy": str(model), "genrm": str(model)},
            "cluster": {"devices": WORLD_SIZE},
            "training": {"learning_rate": 1e-3, "micro_batch_tokens": 256, **training},
            "network": {"http_port": 0},
        }
    )
    folder = RunFolder(path)
    folder.create()
    endpoints = choose_endpoints(config, None)
    folder.write(config, endpoints)
    port = int(endpoints.nats_url.rsplit(":", 1)[1])
    conf = write_server_config(folder.nats, host="127.0.0.1", port=port, token=endpoints.nats_token)

    def python(name: str, module: str, wave: int, *more: str, group: str = "") -> ProcessSpec:
        env = {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PIVOTRL_GPS_BYTES": str(4 << 30),
        }
        return ProcessSpec(
            name,
            (sys.executable, "-m", module, "--run", str(path), *more),
            wave=wave,
            group=group,
            env=tuple(env.items()),
            ready_file=folder.processes / f"{name}.json",
            ready_deadline_s=300,
        )

    specs = [
        ProcessSpec("nats", (server_binary(), "-c", str(conf)), wave=0, is_broker=True),
        python("gps", "services.gps", 1),
        *(
            python(f"rank-{r}", "services.trainer.rank", 2, "--rank", str(r), group="ranks")
            for r in range(WORLD_SIZE)
        ),
    ]
    supervisor = Supervisor(specs, folder.logs)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(supervisor.stop)
        started = time.monotonic()
        try:
            await supervisor.start()
        except Exception:
            for log in sorted(folder.logs.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
            raise
        up_s = time.monotonic() - started
        bus = await connect(endpoints.nats_url, token=endpoints.nats_token, name="test", timeout_s=10)
        stack.push_async_callback(bus.close)
        group = RankGroup(WORLD_SIZE, bus, Subjects(run), SystemClock())
        await group.start()
        gps = GpsClient(endpoints.http_url("gps"), token=endpoints.token, name="test")
        stack.push_async_callback(gps.close)
        await asyncio.wait_for(group.wait_all(), 30)
        yield Ranks(folder, config, endpoints, supervisor, bus, group, gps, {"up": up_s})


def make_samples(count: int, *, vocabulary: int, prompt: int, response: int) -> list[TrainSample]:
    random = np.random.default_rng(3)
    return [
        TrainSample(
            sample_id=f"{i // 4:08d}.{i % 4:02d}",
            prompt_token_ids=tuple(map(int, random.integers(3, vocabulary, prompt + i % 5))),
            response_token_ids=tuple(map(int, random.integers(3, vocabulary, response - i % 7))),
            logprobs=tuple(float(x) for x in random.uniform(-9, -5, response - i % 7)),
            versions=((0, response - i % 7),),
            advantage=(-1.0) ** i,
        )
        for i in range(count)
    ]


def num_response_tokens(samples: Sequence[TrainSample]) -> int:
    return sum(len(s.response_token_ids) for s in samples)


def plain_torch(
    model: Path, config: RunConfig, samples: Sequence[TrainSample], ours: Sequence[dict[str, np.ndarray]]
) -> list[Any]:
    """The same steps in one process, one sample at a time, no DeepSpeed: (loss, gradient norm, weights).

    After each step the few elements that went the other way by rounding are set to `ours`: from there on the
    difference would grow.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from services.trainer.objectives import grpo_loss, token_logprobs

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    parameters = dict(policy.named_parameters())
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(
        masters.values(), lr=config.training.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    total = sum(len(s.response_token_ids) for s in samples)
    results: list[Any] = []
    for weights_after in ours:
        losses = []
        optimizer.zero_grad()
        for sample in samples:
            ids = torch.tensor([(*sample.prompt_token_ids, *sample.response_token_ids)])
            targets = torch.tensor(sample.response_token_ids)
            logits = policy(input_ids=ids).logits[0, -len(targets) - 1 : -1]
            loss = grpo_loss(
                token_logprobs(logits, targets, config.rollout.temperature),
                torch.tensor(sample.logprobs),
                torch.full((len(targets),), sample.advantage),
                clip_low=config.training.clip[0],
                clip_high=config.training.clip[1],
            )
            loss.loss_sum.backward()
            losses.append(float(loss.loss_sum.detach()) / total)
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                master = masters[name]
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None
        for master in masters.values():
            assert master.grad is not None
            master.grad /= total  # at the end as ours: bf16 rounds the same gradients
        norm = float(torch.nn.utils.clip_grad_norm_(masters.values(), 1.0))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        weights = {name: p.detach().float().numpy().copy() for name, p in parameters.items()}
        results.append((sum(losses), norm, weights))
        with torch.no_grad():
            for name, parameter in parameters.items():
                wanted = torch.from_numpy(as_floats(weights_after[name])).view_as(parameter)
                differs = parameter.float() != wanted
                parameter[differs] = wanted[differs].bfloat16()
                masters[name][differs] = wanted[differs]
    return results


def as_floats(raw: np.ndarray) -> np.ndarray:
    """bfloat16, as its bits, to float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def assert_same_update(
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    least_cosine: float,
) -> None:
    """Adam's first steps go by sign: an element whose gradient is lost in bf16 rounding may go either way."""
    ours = np.concatenate([(as_floats(after[n]) - as_floats(before[n])).ravel() for n in sorted(before)])
    theirs = np.concatenate([(expected[n] - as_floats(before[n])).ravel() for n in sorted(before)])
    cosine = float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
    size = float(np.linalg.norm(ours) / np.linalg.norm(theirs))
    print(f"updates: cosine {cosine:.4f}, size {size:.4f}, equal {np.mean(ours == theirs):.3f}")
    assert cosine > least_cosine
    assert size == pytest.approx(1, abs=0.01)


async def test_two_ranks_train_move_write_continue_and_come_back(tmp_path: Path) -> None:
    model = write_model(TinySpec(num_layers=2, vocab_size=301), tmp_path / "models")
    samples = make_samples(5, vocabulary=301, prompt=12, response=20)
    async with running(tmp_path / "run", model, micro_batch_tokens=80) as ranks:
        shares = share_out(samples, WORLD_SIZE, 80)
        assert [len(share) for share in shares.samples] == [3, 2]
        assert shares.num_micro_batches == 2  # one more than rank 1 has
        generation = only_generation(ranks)
        loaded = await ranks.ask("load", LoadCheckpoint(tag=""), RankStatus)
        assert [status.step for status in loaded] == [0, 0]
        version, initial = await ranks.policy()
        assert version == 0

        stepped = await ranks.train(0, samples)
        assert sum(s.response_tokens for s in stepped) == sum(len(s.response_token_ids) for s in samples)
        assert stepped[0].grad_norm == stepped[1].grad_norm
        wrote = await ranks.ask("write", WritePolicy(version=1), RankWrote)
        assert any(w.committed for w in wrote)
        version, first = await ranks.policy()
        assert version == 1
        assert sum(w.nbytes for w in wrote) == sum(array.nbytes for array in first.values())
        assert all((first[name] != initial[name]).any() for name in first if "norm" not in name)

        await ranks.ask("save", SaveCheckpoint(tag="step-000001"), CheckpointSaved)
        off = await ranks.ask("offload", OffloadStates(), RankMoved)
        back = await ranks.ask("reload", ReloadStates(), RankMoved)
        assert all(moved.moved_bytes > 0 for moved in (*off, *back))
        moved = await ranks.train(1, samples)
        await ranks.ask("write", WritePolicy(version=2), RankWrote)
        _, after_move = await ranks.policy()

        left = await ranks.train_part(2, samples[:2], None)  # a step that nobody ends: loading drops it
        assert [s.grad_norm for s in left] == [0, 0]
        await ranks.ask("load", LoadCheckpoint(tag="step-000001"), RankStatus)
        again = await ranks.train(1, samples)
        await ranks.ask("write", WritePolicy(version=3), RankWrote)
        _, after_load = await ranks.policy()
        assert [s.loss_sum for s in again] == [s.loss_sum for s in moved]
        assert_equal(after_load, after_move)

        await ranks.ask("load", LoadCheckpoint(tag="step-000001"), RankStatus)
        parts = [
            await ranks.train_part(1, samples[:2], None),
            await ranks.train_part(1, samples[2:4], None),
        ]
        await ranks.ask("offload", OffloadStates(), RankMoved)  # its devices may be lent between parts
        parts += [
            await ranks.train_part(1, samples[4:], num_response_tokens(samples)),  # nothing for rank 1
        ]
        in_parts = [answer for answers in parts for answer in answers]
        await ranks.ask("write", WritePolicy(version=4), RankWrote)
        _, after_parts = await ranks.policy()

        tokens = num_response_tokens(samples)
        expected = await asyncio.to_thread(plain_torch, model, ranks.config, samples, [first, after_move])
        assert_same_update(initial, first, expected[0][2], 0.99)
        assert_same_update(first, after_move, expected[1][2], 0.99)
        assert_same_update(first, after_parts, expected[1][2], 0.99)
        for answers, (loss, norm, _) in zip(
            (stepped, moved, in_parts), (*expected, expected[1]), strict=True
        ):
            ours, our_norm = sum(s.loss_sum for s in answers) / tokens, max(s.grad_norm for s in answers)
            print(f"loss {ours:.5f} / {loss:.5f}, norm {our_norm} / {norm}")
            assert ours == pytest.approx(loss, rel=1e-3)
            assert our_norm == pytest.approx(norm, rel=1e-3)

        os.kill(ranks.supervisor.pids["rank-1"], signal.SIGKILL)
        await asyncio.wait_for(ranks.group.lost(), 60)
        await asyncio.wait_for(ranks.group.wait_all(), 120)
        assert only_generation(ranks) != generation
        await ranks.ask("load", LoadCheckpoint(tag="step-000001"), RankStatus)
        recovered = await ranks.train(1, samples)
        assert [s.loss_sum for s in recovered] == [s.loss_sum for s in moved]
        await ranks.ask("write", WritePolicy(version=5), RankWrote)
        _, after_death = await ranks.policy()
        assert_equal(after_death, after_move)

        # rank 0 alone waits for rank 1 in a collective; it must leave all the same
        alone = asyncio.create_task(
            ranks.bus.request(
                Subjects(ranks.config.run.name).rank(0, "save"),
                SaveCheckpoint(tag="never"),
                CheckpointSaved,
                deadline_s=60,
                role="test",
                peer="rank 0",
                phase="save",
            )
        )
        await asyncio.sleep(1.0)
        assert not alone.done()
        alone.cancel()
        print({name: round(seconds, 2) for name, seconds in ranks.seconds.items()})
        rank_pids = [ranks.supervisor.pids[f"rank-{r}"] for r in range(WORLD_SIZE)]
        stopping = time.monotonic()
        for pid in rank_pids:
            os.kill(pid, signal.SIGTERM)
        await asyncio.to_thread(psutil.wait_procs, [psutil.Process(pid) for pid in rank_pids], 10)
        assert time.monotonic() - stopping < 4


async def test_a_gps_killed_in_the_middle_of_a_write_costs_another_try(tmp_path: Path) -> None:
    """Rank 0 has committed and rank 1 has not begun when GPS dies; its next life knows no such Write."""
    model = write_model(TinySpec(num_layers=1, vocab_size=301), tmp_path / "models")
    samples = make_samples(4, vocabulary=301, prompt=6, response=10)
    async with running(tmp_path / "run", model) as ranks:
        generation = only_generation(ranks)
        await ranks.ask("load", LoadCheckpoint(tag=""), RankStatus)
        _, initial = await ranks.policy()
        await ranks.train(0, samples)

        async def gps_version() -> int:
            return (await ranks.gps.model("policy")).version

        retried: list[tuple[int, str]] = []
        writer = PolicyWriter(ranks.group, gps_version, SystemClock(), Tries())
        os.kill(ranks.supervisor.pids["rank-1"], signal.SIGSTOP)
        try:
            writing = asyncio.create_task(writer.write(1, lambda number, why: retried.append((number, why))))
            async with asyncio.timeout(60):
                while await pending_writers(ranks) != ("rank-1",):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            os.kill(ranks.supervisor.pids["gps"], signal.SIGKILL)
        finally:
            os.kill(ranks.supervisor.pids["rank-1"], signal.SIGCONT)
        await asyncio.wait_for(writing, 60)
        print(retried)
        assert [number for number, _ in retried] == list(range(2, len(retried) + 2))
        assert retried
        assert only_generation(ranks) == generation
        version, written = await ranks.policy()
        assert version == 1
        assert any((written[name] != initial[name]).any() for name in initial)
        await ranks.ask("write", WritePolicy(version=2), RankWrote)
        _, undisturbed = await ranks.policy()
        assert_equal(written, undisturbed)


async def pending_writers(ranks: Ranks) -> tuple[str, ...]:
    """Of the Write that is open, if one is."""
    status = await ranks.gps.model("policy")
    return status.open_write.pending_writers if status.open_write else ()


def only_generation(ranks: Ranks) -> str:
    (generation,) = {status.incarnation.split("/")[0] for status in ranks.group.statuses.values()}
    return generation


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array, err_msg=name)
