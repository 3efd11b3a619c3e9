"""Scores each trajectory once: the verifier at once, the GenRM as a sequence through the role's scheduler.

    trajectory ─► verifier (thread) ─► GenRM attempt 1..n ─► verdict ─► scored
                                            └─ none by the last attempt or the deadline ─► unscored

A trajectory leaves its stream only after its score lies safely in the other, so a crash repeats work but
loses none."""

import asyncio
import logging
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from services.reward.genrm import Verdict, genrm_messages, parse_verdict
from services.reward.verifier_process import VerifierProcess
from shared.bus.ports import Bus
from shared.contracts.replica import SamplingSpec
from shared.contracts.reward import ScoredSample
from shared.contracts.rollout import Trajectory
from shared.contracts.subjects import Subjects
from shared.errors import PivotError
from shared.inference.records import SequenceRecord
from shared.inference.role import RoleShell
from shared.runtime.clock import Clock
from shared.runtime.config import RunConfig
from shared.runtime.journal import Journal
from shared.runtime.tokenizer import ChatTokenizer

log = logging.getLogger("pivotrl.reward")
MAX_TRANSCRIPTS = 256
DEADLINE_LOOK_S = 1.0


@dataclass(slots=True)
class _Case:
    """One trajectory on its way to a score."""

    seq: int
    trajectory: Trajectory
    verifiable: float
    deadline_s: float
    attempt: int = 0
    genrm_tokens: int = 0


class RewardService:
    def __init__(
        self,
        config: RunConfig,
        tokenizer: ChatTokenizer,
        template: str,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        journal: Journal,
    ) -> None:
        self._config, self._tokenizer, self._template = config, tokenizer, template
        self._bus, self._subjects, self._clock, self._journal = bus, subjects, clock, journal
        self._cases: dict[str, _Case] = {}
        self._settled: set[str] = set()
        self._direct: dict[str, asyncio.Future[SequenceRecord | None]] = {}
        self._verifier = VerifierProcess()
        self._num_direct = 0
        self.shell: RoleShell | None = None
        self.num_received = 0
        self.num_scored = 0
        self.num_unscored = 0
        self.num_no_verdict = 0
        self.transcripts: deque[dict[str, Any]] = deque(maxlen=MAX_TRANSCRIPTS)

    def describe(self) -> tuple[int, int, int, str]:
        blocked_on = "" if self._cases else "trajectories from rollout"
        return len(self._cases), self.num_received, self.num_scored + self.num_unscored, blocked_on

    def gauges(self) -> dict[str, float]:
        return {
            "num_under_way": len(self._cases),
            "num_scored": self.num_scored,
            "num_unscored": self.num_unscored,
            "num_attempts_without_verdict": self.num_no_verdict,
        }

    async def close(self) -> None:
        await self._verifier.close()

    # Cases

    async def follow_trajectories(self) -> None:
        self._settled |= {
            stored.message.trajectory.sample_id
            for stored in await self._bus.replay(
                self._subjects.scored_stream, self._subjects.scored, ScoredSample
            )
        }
        stream, subject = self._subjects.trajectories_stream, self._subjects.trajectory
        async for stored in self._bus.follow(stream, subject, Trajectory):
            sample = stored.message.sample_id
            if sample in self._settled or sample in self._cases:
                await self._bus.discard(stream, stored.seq)
                continue
            await self._open(stored.seq, stored.message)

    async def _open(self, seq: int, trajectory: Trajectory) -> None:
        self.num_received += 1
        deadline_s = self._clock.now_s() + self._config.reward.deadline_s
        case = _Case(seq, trajectory, 0.0, deadline_s)
        self._cases[trajectory.sample_id] = case
        if trajectory.finish_reason == "failed":
            await self._close(case, None, f"rollout failed: {trajectory.task.get('failed', '')}")
            return
        try:
            case.verifiable = await self._verifier.verify(trajectory.task, trajectory.response_text)
        except PivotError as error:
            await self._close(case, None, f"verifier: {error.message}")
            return
        self._ask(case)

    def _ask(self, case: _Case) -> None:
        assert self.shell is not None
        answer = str(case.trajectory.task.get("answer", ""))
        messages = genrm_messages(
            self._template, case.trajectory.prompt_text, case.trajectory.response_text, answer
        )
        sample = case.trajectory.sample_id
        record = self._record(f"{sample}/{case.attempt}", messages, case.attempt)
        record.context = case
        self.shell.submit(record)

    def _record(self, sequence_id: str, messages: list[Any], attempt: int) -> SequenceRecord:
        reward = self._config.reward
        token_ids = self._tokenizer.chat(messages)
        room = self._config.max_model_len - reward.max_new_tokens
        rng = random.Random(f"{self._config.run.seed}/{sequence_id}")
        return SequenceRecord(
            sequence_id,
            tuple(token_ids[-room:]),
            SamplingSpec(
                max_new_tokens=reward.max_new_tokens,
                temperature=reward.temperature if attempt == 0 else max(reward.temperature, 0.7),
                seed=rng.getrandbits(31),
                stop_token_ids=self._tokenizer.stop_token_ids,
            ),
        )

    async def on_finished(self, record: SequenceRecord) -> None:
        if (waiter := self._direct.pop(record.sequence_id, None)) is not None:
            if not waiter.done():
                waiter.set_result(record)
            return
        case: _Case = record.context
        case.genrm_tokens += record.num_tokens
        text = self._tokenizer.decode(record.token_ids)
        verdict = parse_verdict(text)
        self._keep_transcript(record, text, verdict)
        if verdict is not None:
            await self._close(case, verdict.score, None)
            return
        self.num_no_verdict += 1
        case.attempt += 1
        if case.attempt >= self._config.reward.attempts:
            await self._close(case, None, f"no verdict in {case.attempt} attempts")
        elif self._clock.now_s() > case.deadline_s:
            await self._close(case, None, f"no verdict within {self._config.reward.deadline_s:g} s")
        else:
            self._ask(case)

    async def on_failed(self, record: SequenceRecord, reason: str) -> None:
        if (waiter := self._direct.pop(record.sequence_id, None)) is not None:
            if not waiter.done():
                waiter.set_result(None)
            return
        await self._close(record.context, None, f"GenRM sequence failed: {reason}")

    async def watch_deadlines(self) -> None:
        """A sample whose GenRM sequence waits or runs beyond the deadline is closed as unscored. Time in
        which no replica serves, because the devices are elsewhere, does not count."""
        assert self.shell is not None
        looked_s = self._clock.now_s()
        while True:
            await asyncio.sleep(DEADLINE_LOOK_S)
            now_s = self._clock.now_s()
            passed_s, looked_s = now_s - looked_s, now_s
            if not self.shell.active_replicas:
                for case in self._cases.values():
                    case.deadline_s += passed_s
                continue
            for case in [c for c in self._cases.values() if now_s > c.deadline_s]:
                self.shell.cancel(f"{case.trajectory.sample_id}/{case.attempt}")
                await self._close(case, None, f"no verdict within {self._config.reward.deadline_s:g} s")

    async def _close(self, case: _Case, genrm: float | None, unscored_reason: str | None) -> None:
        sample = case.trajectory.sample_id
        if self._cases.pop(sample, None) is None:
            return
        scored = ScoredSample(
            trajectory=case.trajectory,
            reward=None if genrm is None else case.verifiable + genrm,
            verifiable_reward=case.verifiable,
            genrm_reward=genrm,
            genrm_attempts=min(case.attempt + 1, self._config.reward.attempts),
            genrm_tokens=case.genrm_tokens,
            unscored_reason=unscored_reason,
        )
        await self._bus.append(self._subjects.scored, scored, dedupe_id=f"scored/{sample}")
        self._settled.add(sample)
        await self._bus.discard(self._subjects.trajectories_stream, case.seq)
        if genrm is None:
            self.num_unscored += 1
            self._journal.append({"event": "unscored", "sample": sample, "reason": unscored_reason})
        else:
            self.num_scored += 1

    # On demand

    async def score(self, question: str, response: str, answer: str = "") -> dict[str, Any]:
        """One GenRM call outside the training stream (`POST /v1/score`)."""
        assert self.shell is not None
        self._num_direct += 1
        sequence_id = f"score-{self._clock.unix_s():.3f}-{self._num_direct}"
        record = self._record(
            sequence_id, list(genrm_messages(self._template, question, response, answer)), 0
        )
        waiter: asyncio.Future[SequenceRecord | None] = asyncio.get_running_loop().create_future()
        self._direct[sequence_id] = waiter
        self.shell.submit(record)
        try:
            async with asyncio.timeout(self._config.reward.deadline_s):
                finished = await waiter
        except TimeoutError:
            self._direct.pop(sequence_id, None)
            self.shell.cancel(sequence_id)
            finished = None
        text = self._tokenizer.decode(finished.token_ids) if finished else ""
        verdict = parse_verdict(text)
        return {
            "score": verdict.score if verdict else None,
            "reasoning": text,
            "tokens": finished.num_tokens if finished else 0,
        }

    def _keep_transcript(self, record: SequenceRecord, text: str, verdict: Verdict | None) -> None:
        case: _Case = record.context
        self.transcripts.append(
            {
                "sequence_id": record.sequence_id,
                "question": case.trajectory.prompt_text,
                "response": case.trajectory.response_text,
                "reasoning": text,
                "score": verdict.score if verdict else None,
                "verifiable": case.verifiable,
            }
        )
