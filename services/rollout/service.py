"""Issues prompts within the staleness bound and hands finished trajectories on, each exactly once.

What a restart needs is derived, not stored: sample ids follow from the index; what is finished lies in the
streams or was trained (policy version times batch); everything else that the journal says was issued is
run again."""

import asyncio
import logging
import random

from services.rollout.dataset import PromptSource
from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.gps import PolicyVersion
from shared.contracts.replica import SamplingSpec
from shared.contracts.reward import ScoredSample
from shared.contracts.rollout import Trajectory
from shared.contracts.subjects import Subjects
from shared.ids import sample_id
from shared.inference.records import SequenceRecord
from shared.inference.role import RoleShell
from shared.runtime.config import RunConfig
from shared.runtime.journal import Journal
from shared.runtime.tokenizer import ChatTokenizer
from shared.scheduling.staleness import num_issuable

log = logging.getLogger("pivotrl.rollout")


class RolloutService:
    def __init__(
        self,
        config: RunConfig,
        source: PromptSource,
        tokenizer: ChatTokenizer,
        bus: Bus,
        subjects: Subjects,
        journal: Journal,
    ) -> None:
        self._config, self._source, self._tokenizer = config, source, tokenizer
        self._bus, self._subjects, self._journal = bus, subjects, journal
        self._version = 0
        self._version_changed = asyncio.Event()
        self.num_issued = 0
        self.num_finished = 0
        self.num_skipped = 0
        self._next_index = 0
        self.shell: RoleShell | None = None

    # Issuing

    @property
    def version(self) -> int:
        return self._version

    def describe(self) -> tuple[int, int, int, str]:
        assert self.shell is not None
        total = self._config.training.steps * self._config.batch_samples
        blocked_on = ""
        if self.num_issued >= total:
            blocked_on = "every sample of the run is issued"
        elif self._issuable() <= 0:
            blocked_on = (
                f"policy version {self._version + 1} (staleness bound {self._config.training.staleness})"
            )
        return len(self.shell.records), self.num_issued, self.num_finished, blocked_on

    def _issuable(self) -> int:
        t = self._config.training
        bound = num_issuable(self._version, t.staleness, self._config.batch_samples, self.num_issued)
        return min(bound, t.steps * self._config.batch_samples - self.num_issued)

    async def issue_for_ever(self) -> None:
        """Issues whole groups as the bound allows, after each new policy version."""
        group = self._config.rollout.samples_per_prompt
        while True:
            self._version_changed.clear()
            while self._issuable() >= group:
                self._issue(self._next_index)
                self._next_index += 1
                await asyncio.sleep(0)
            await self._version_changed.wait()

    def _issue(self, index: int) -> None:
        assert self.shell is not None
        records = self.group_records(index)
        self._journal.append(
            *({"event": "issued", "sample": r.sequence_id, "version": self._version} for r in records)
        )
        self.num_issued += len(records)
        for record in records:
            self.shell.submit(record)

    def group_records(self, index: int) -> list[SequenceRecord]:
        """The sequences of the prompt at `index`; equal for equal seeds."""
        prompt = self._source.prompt(index)
        token_ids = tuple(self._tokenizer.chat(prompt.messages))
        limit = self._config.rollout.max_prompt_tokens
        if len(token_ids) > limit:
            self.num_skipped += 1
            log.warning(
                "prompt %d has %d tokens: cut to rollout.max_prompt_tokens = %d", index, len(token_ids), limit
            )
            token_ids = token_ids[-limit:]
        rng = random.Random(f"{self._config.run.seed}/{index}")
        return [
            SequenceRecord(
                sample_id(index, k),
                token_ids,
                SamplingSpec(
                    max_new_tokens=self._config.rollout.max_new_tokens,
                    temperature=self._config.rollout.temperature,
                    seed=rng.getrandbits(31),
                    stop_token_ids=self._tokenizer.stop_token_ids,
                ),
                context=(index, prompt),
            )
            for k in range(self._config.rollout.samples_per_prompt)
        ]

    # Finishing

    async def on_finished(self, record: SequenceRecord) -> None:
        index, prompt = record.context
        trajectory = Trajectory(
            sample_id=record.sequence_id,
            prompt_index=index,
            group_size=self._config.rollout.samples_per_prompt,
            prompt_token_ids=record.prompt_token_ids,
            response_token_ids=tuple(record.token_ids),
            logprobs=tuple(record.logprobs),
            versions=tuple(record.versions),
            finish_reason=record.finish_reason or "stop",
            prompt_text=prompt.question,
            response_text=self._tokenizer.decode(record.token_ids),
            task=prompt.task,
        )
        await self._bus.append(
            self._subjects.trajectory, trajectory, dedupe_id=f"trajectory/{record.sequence_id}"
        )
        self.num_finished += 1

    async def on_failed(self, record: SequenceRecord, reason: str) -> None:
        """The engine refuses this sequence for good. It goes on as an empty response, so that its group
        completes."""
        log.error("sample %s failed: %s", record.sequence_id, reason)
        index, prompt = record.context
        trajectory = Trajectory(
            sample_id=record.sequence_id,
            prompt_index=index,
            group_size=self._config.rollout.samples_per_prompt,
            prompt_token_ids=record.prompt_token_ids,
            response_token_ids=(),
            logprobs=(),
            versions=((self._version, 0),),
            finish_reason="failed",
            prompt_text=prompt.question,
            response_text="",
            task={**prompt.task, "failed": reason},
        )
        await self._bus.append(
            self._subjects.trajectory, trajectory, dedupe_id=f"trajectory/{record.sequence_id}"
        )
        self.num_finished += 1

    # Versions and restarts

    async def on_version(self, message: Message) -> None:
        assert isinstance(message, PolicyVersion)
        if message.model != "policy" or message.version <= self._version:
            return
        assert self.shell is not None
        # Issued under this version means: no token by an older one. So every replica has it first.
        await self.shell.shifts.refresh(message.version)
        self._version = max(self._version, message.version)
        self._version_changed.set()

    async def recover(self, issued: list[str], version: int) -> int:
        """Takes up where a former process of this run stopped; returns the number of sequences run again."""
        assert self.shell is not None
        self._version = version
        self.shell.shifts.require_version(version)
        trained = version * self._config.training.prompts_per_step
        done = {
            stored.message.sample_id
            for stored in await self._bus.replay(
                self._subjects.trajectories_stream, self._subjects.trajectory, Trajectory
            )
        } | {
            stored.message.trajectory.sample_id
            for stored in await self._bus.replay(
                self._subjects.scored_stream, self._subjects.scored, ScoredSample
            )
        }
        issued_set = set(issued)
        self._next_index = 0
        unfinished: list[SequenceRecord] = []
        while any(sample_id(self._next_index, k) in issued_set for k in range(2)):
            index = self._next_index
            self._next_index += 1
            names = [sample_id(index, k) for k in range(self._config.rollout.samples_per_prompt)]
            if missing := [name for name in names if name not in issued_set]:  # lines torn by a power cut
                self._journal.append(
                    *({"event": "issued", "sample": name, "version": version} for name in missing)
                )
            if index < trained:
                continue
            unfinished += [r for r in self.group_records(index) if r.sequence_id not in done]
        self.num_issued = self._next_index * self._config.rollout.samples_per_prompt
        self.num_finished = self.num_issued - len(unfinished)
        kept = await self.shell.recover(unfinished)
        if unfinished:
            log.warning("resumed: %d sequences under way, %d of their tokens kept", len(unfinished), kept)
        return len(unfinished)
