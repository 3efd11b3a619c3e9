"""The trainer's shell.

    starting ─ranks loaded─► idle ─shift up─► active ─step done─► done ─shift down─► idle
                                                └────◄─next batch ready──┘

With streaming a step is trained in parts, as prompts become complete. Between them training stays active, or,
where it lends its devices, is done or idle too, and its gradients are offloaded with the other states.

One step, and what a crash at each point means:

    stage, train, a part    nothing has happened: the step is done again from the last checkpoint
    ranks save, journal     the journal's entry is void, as `resumed` says, unless…
    latest.json             …the step is done: from here it counts
    Write to GPS            a start after this point Writes the checkpoint's version if GPS lacks it; a node
                            of GPS that is lost costs another try (`policy_write`), no start
    discard from the stream a start after this point discards again
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from services.trainer.advantages import Weighted
from services.trainer.batches import Batch, BatchAssembler
from services.trainer.packing import share_out
from services.trainer.policy_write import PolicyWriter, Tries
from services.trainer.rank_group import RankGroup, RanksLost
from services.trainer.step import Step, train_sample
from shared.bus.ports import Bus
from shared.contracts.base import Done, Message
from shared.contracts.planner import DeviceLease, ShiftStepDone
from shared.contracts.rank import (
    CheckpointSaved,
    LoadCheckpoint,
    OffloadStates,
    RankMoved,
    RankStatus,
    RankStepped,
    ReloadStates,
    SaveCheckpoint,
    StageSamples,
    TrainSample,
    TrainStep,
)
from shared.contracts.reward import ScoredSample
from shared.contracts.subjects import Subjects
from shared.contracts.trainer import TrainingActivity, TrainingTelemetry
from shared.errors import Conflict, DeadlineExceeded, EngineError, TransportError
from shared.ids import Role
from shared.runtime.checkpoints import Checkpoint, Checkpoints
from shared.runtime.clock import Clock
from shared.runtime.config import RunConfig
from shared.runtime.journal import Journal
from shared.runtime.topology import rank_devices
from shared.scheduling.streaming import STREAMING

log = logging.getLogger("pivotrl.trainer")
MOVE_DEADLINE_S = 110.0
LOAD_DEADLINE_S = 600.0
STEP_DEADLINE_S = 3600.0
START_OVER_PAUSE_S = 1.0
STAGE_PART_TOKENS = 400_000
"""Tokens per staging message; a token with its log-probability takes at most 14 bytes on the wire."""


class TrainerService:
    def __init__(
        self,
        config: RunConfig,
        ranks: RankGroup,
        checkpoints: Checkpoints,
        journal: Journal,
        gps_version: Callable[[], Awaitable[int]],
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        write_tries: Tries = Tries(),
    ) -> None:
        self._config, self._ranks, self._checkpoints = config, ranks, checkpoints
        self._journal, self._gps_version = journal, gps_version
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self._writer = PolicyWriter(ranks, gps_version, clock, write_tries)
        self.activity: TrainingActivity = "starting"
        self.holds_devices = False
        self.paused = False
        self.phase = "waiting for ranks"
        self.step = 0
        self.tokens_total = 0
        self._streaming = STREAMING[config.training.streaming]
        self.assembler = BatchAssembler(
            config.training.prompts_per_step,
            config.rollout.samples_per_prompt,
            self._streaming,
            config.has_training_devices,
        )
        self._work = asyncio.Event()
        self._news = asyncio.Event()
        self._moving = asyncio.Lock()
        self._is_fresh = True

    @property
    def finished(self) -> bool:
        return self.step >= self._config.training.steps

    def telemetry(self) -> TrainingTelemetry:
        return TrainingTelemetry(
            activity=self.activity,
            batch_ready=self._is_ready(),
            holds_devices=self.holds_devices,
            step=self.step,
            policy_version=self.step,
            collected=self.assembler.collected(),
            needed=self.assembler.needed,
            tokens_total=self.tokens_total,
            finished=self.finished,
            phase=self.phase,
        )

    def gauges(self) -> dict[str, float]:
        return {
            "step": self.step,
            "collected_samples": self.assembler.collected(),
            "duplicates_ignored": self.assembler.num_duplicates,
            "holds_devices": self.holds_devices,
            "tokens_total": self.tokens_total,
        }

    # Life

    async def start(self) -> None:
        await self._ranks.start()
        await self._bus.serve(self._subjects.shift(Role.TRAINING, "up"), self._on_shift_up)
        await self._bus.serve(self._subjects.shift(Role.TRAINING, "down"), self._on_shift_down)

    async def run_for_ever(self) -> None:
        """Loads the ranks, trains when devices and a batch are there, and starts over when ranks are lost.

        GPS being away for long, or its readers being slow, costs a start over too. What no start over can
        mend (a checkpoint that is gone, a model that does not fit its layout) ends the process.
        """
        while True:
            try:
                await self._load()
                await self._train_until_lost()
            except (EngineError, DeadlineExceeded, TransportError, Conflict) as error:
                log.error("training starts over from its last checkpoint: %s", error.message)
                self._ranks.forget()
                self._set("starting", "waiting for ranks")
                await asyncio.sleep(START_OVER_PAUSE_S)

    async def _train_until_lost(self) -> None:
        """Raises what training raised, or RanksLost."""
        training = asyncio.create_task(self._train_for_ever())
        lost = asyncio.create_task(self._ranks.lost())
        try:
            await asyncio.wait([training, lost], return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                training.result()
            raise RanksLost("a rank was lost")
        finally:
            for task in (training, lost):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _load(self) -> None:
        """Brings the ranks to the last checkpoint, GPS to its version, and the states to where the lease
        says."""
        self._set("starting", "waiting for ranks")
        await self._ranks.wait_all()
        if self._is_fresh:
            self.holds_devices = self._ranks.are_on_device and await self._is_leased()
            self._is_fresh = False
        latest = self._checkpoints.latest()
        self._set("starting", f"loading {latest.tag or 'the initial policy'}")
        await self._ranks.ask("load", LoadCheckpoint(tag=latest.tag), RankStatus, deadline_s=LOAD_DEADLINE_S)
        self.step = latest.step
        for seq in self.assembler.resume(latest.step):  # trained, and lost before they were discarded
            await self._bus.discard(self._subjects.scored_stream, seq)
        self._journal.append({"event": "resumed", "step": latest.step})
        if await self._gps_version() < latest.step:
            await self._write(latest.step, f"writing version {latest.step}")
        if self.holds_devices:
            self._set("done", "")
            self._work.set()
        else:
            await self._ranks.ask("offload", OffloadStates(), RankMoved, deadline_s=LOAD_DEADLINE_S)
            self._set("idle", "")

    async def _is_leased(self) -> bool:
        """Whether all devices of the ranks are leased to training: an earlier life of this held them."""
        await self._bus.ensure_bucket(self._subjects.device_bucket)
        for device in rank_devices(self._config):
            found = await self._bus.kv_get(self._subjects.device_bucket, f"{device}", DeviceLease)
            if found is None or found[0].owner != Role.TRAINING.value:
                return False
        return True

    async def follow_scored(self) -> None:
        stream = self._subjects.scored_stream
        async for stored in self._bus.follow(stream, self._subjects.scored, ScoredSample):
            if not self.assembler.add(stored.seq, stored.message):
                await self._bus.discard(stream, stored.seq)
                continue
            if self.assembler.is_ready():
                self._work.set()
            self._news.set()

    async def report_for_ever(self) -> None:
        while True:
            self._news.clear()
            await self._bus.publish(self._subjects.training_state, self.telemetry())
            try:
                async with asyncio.timeout(1.0):
                    await self._news.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._work.set()
        self._news.set()

    # Shifts

    async def _on_shift_up(self, message: Message) -> Message:
        async with self._moving:
            if self.activity == "starting":
                raise Conflict(f"training is not ready: {self.phase}")
            started_s = self._clock.now_s()
            moved: list[RankMoved] = []
            if not self.holds_devices:
                self._set(self.activity, "reloading states")
                moved = await self._ranks.ask("reload", ReloadStates(), RankMoved, deadline_s=MOVE_DEADLINE_S)
            self.holds_devices = True
            self._set("active" if self._can_train() else "done", self._resting_phase())
            self._work.set()
            return ShiftStepDone(
                duration_s=self._clock.now_s() - started_s, read_bytes=sum(m.moved_bytes for m in moved)
            )

    async def _on_shift_down(self, message: Message) -> Message:
        async with self._moving:
            if self.activity == "active":
                raise Conflict("training is active: it gives its devices when it has trained what is there")
            started_s = self._clock.now_s()
            moved: list[RankMoved] = []
            if self.holds_devices and self.activity != "starting":
                self._set(self.activity, "offloading states")
                moved = await self._ranks.ask(
                    "offload", OffloadStates(), RankMoved, deadline_s=MOVE_DEADLINE_S
                )
            self.holds_devices = False
            if self.activity == "done":
                self._set("idle", self._resting_phase())
            return ShiftStepDone(
                duration_s=self._clock.now_s() - started_s, freed_bytes=sum(m.freed_bytes for m in moved)
            )

    # Steps

    def _is_ready(self) -> bool:
        """There is something to train now. A pause lets no step begin, but ends one that has begun."""
        may_begin = not self.paused or self.assembler.has_begun
        return self.assembler.is_ready() and may_begin and not self.finished

    def _can_train(self) -> bool:
        return self.holds_devices and self._is_ready()

    async def _train_for_ever(self) -> None:
        step = Step(self.step)
        while True:
            self._work.clear()
            while self._can_train():
                async with self._moving:
                    if not self._can_train():  # a shift down came first
                        break
                    self._set("active", "")
                await self._train_part(step, self.assembler.take())
                if self.assembler.is_taken:
                    await self._complete(step)
                    step = Step(self.step)
            if self.holds_devices and self.activity == "active":
                keeps = step.num_parts > 0 and not (self._streaming and self._streaming.lends)
                self._set("active" if keeps else "done", self._resting_phase())
            await self._work.wait()

    def _resting_phase(self) -> str:
        return "waiting for the rest of the batch" if self.assembler.has_begun else ""

    async def _train_part(self, step: Step, part: Batch) -> None:
        """The optimizer steps with the last part, even if none of that part's samples can be trained."""
        weighted = step.take_up(part)
        is_last = self.assembler.is_taken
        if not weighted and not (is_last and step.weighted):
            return
        started_s = self._clock.now_s()
        total = step.response_tokens if is_last else None
        step.stepped += await self._ask_ranks_to_train(step.number, weighted, total)
        step.train_s += self._clock.now_s() - started_s

    async def _complete(self, step: Step) -> None:
        """From the optimizer's step to the samples' end."""
        version = step.number + 1
        tag = Checkpoints.tag(version)
        self._set("active", "saving the checkpoint")
        await self._ranks.ask("save", SaveCheckpoint(tag=tag), CheckpointSaved, deadline_s=LOAD_DEADLINE_S)
        self._journal.append(*step.journal_entries())
        self._checkpoints.commit(Checkpoint(version, tag))
        write_started_s = self._clock.now_s()
        await self._write(version, "writing the policy")
        row = step.row(self._clock.now_s() - write_started_s)
        self.assembler.trained()
        self.step = version
        self.tokens_total += row.tokens
        await self._bus.append(self._subjects.step_completed, row, dedupe_id=f"step/{version}")
        for seq in step.seqs:
            await self._bus.discard(self._subjects.scored_stream, seq)
        self._news.set()

    async def _write(self, version: int, phase: str) -> None:
        """The policy into GPS as `version`. Raises as `PolicyWriter.write` does."""

        def retrying(number: int, why: str) -> None:
            self._set(self.activity, f"{phase}, try {number}")
            self._journal.append({"event": "write_retried", "step": version, "try": number, "why": why})

        self._set(self.activity, phase)
        await self._writer.write(version, retrying)

    async def _ask_ranks_to_train(
        self, step: int, weighted: list[Weighted], total_response_tokens: int | None
    ) -> list[RankStepped]:
        samples = [train_sample(w) for w in weighted]
        shares = share_out(samples, self._ranks.world_size, self._config.training.micro_batch_tokens)
        self._set("active", f"training {len(samples)} samples")
        parts = [_parts(step, list(share)) for share in shares.samples]
        for k in range(max(len(p) for p in parts)):
            messages = [p[min(k, len(p) - 1)] for p in parts]
            await self._ranks.ask("stage", messages, Done, deadline_s=MOVE_DEADLINE_S)
        command = TrainStep(
            step=step,
            total_response_tokens=total_response_tokens,
            num_micro_batches=shares.num_micro_batches,
        )
        return await self._ranks.ask("train", command, RankStepped, deadline_s=STEP_DEADLINE_S)

    async def save_checkpoint(self) -> Checkpoint:
        """Every step saves one; this answers with the newest."""
        return self._checkpoints.latest()

    def _set(self, activity: TrainingActivity, phase: str) -> None:
        self.activity, self.phase = activity, phase
        self._news.set()


def _parts(step: int, samples: list[TrainSample]) -> list[StageSamples]:
    """A rank's share in messages that fit the bus; an empty share is one empty message."""
    parts: list[list[TrainSample]] = [[]]
    tokens = 0
    for sample in samples:
        size = len(sample.prompt_token_ids) + len(sample.response_token_ids)
        if parts[-1] and tokens + size > STAGE_PART_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(sample)
        tokens += size
    return [
        StageSamples(step=step, part=i, num_parts=len(parts), samples=tuple(part))
        for i, part in enumerate(parts)
    ]
