"""One replica's engine as a model: decode by the throughput model, prefill first, KV cache with preemption.

Between two changes n sequences decode in lockstep and their tokens grow by n a step, so that x steps take

    x·(overhead(n) + A·tok) + A·n·x²/2      seconds

which is solved for x exactly: events are needed only where a sequence joins, finishes or is stopped. Steps
are real numbers; what is reported is whole tokens.

Prefill (also of a sequence that comes back with tokens, whose KV cache was dropped) holds up the whole
replica for its compute time, as chunked prefill does in sum. When the cache is full the youngest sequence
is preempted and prefilled again once there is room, as vLLM does.

Device time is told apart while it passes: decode, of it `underfilled` (what fewer sequences than the best
batch cost), prefill, refresh (reading new weights), and idle.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf, sqrt

from shared.ids import SequenceId
from shared.scheduling.throughput import ThroughputModel

_EPSILON_STEPS = 1e-6
_REJOIN_ROOM_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How a replica of a role behaves."""

    throughput: ThroughputModel
    prefill_s_per_token: float
    kv_capacity_tokens: int
    num_devices: int
    """Devices of one replica."""
    best_overhead_s: float
    """Least overhead per token at the best batch that fits: what `underfilled` is measured against."""


@dataclass(slots=True)
class Usage:
    """Seconds of replicas by use (times devices per replica: device-seconds), and tokens generated."""

    decode_s: float = 0.0
    underfilled_s: float = 0.0
    prefill_s: float = 0.0
    refresh_s: float = 0.0
    idle_s: float = 0.0
    tokens: float = 0.0
    num_preemptions: int = 0

    def add(self, other: "Usage", sign: float = 1.0) -> None:
        """Take in (or with sign -1 take out) another account."""
        self.decode_s += sign * other.decode_s
        self.underfilled_s += sign * other.underfilled_s
        self.prefill_s += sign * other.prefill_s
        self.refresh_s += sign * other.refresh_s
        self.idle_s += sign * other.idle_s
        self.tokens += sign * other.tokens
        self.num_preemptions += round(sign) * other.num_preemptions


@dataclass(slots=True, eq=False)
class _Run:
    sequence: SequenceId
    attempt: int
    length: int
    """Resident tokens when it joined."""
    generated: int
    """Tokens generated when it joined."""
    remaining: int
    joined_steps: float = 0.0
    order: int = 0
    is_decoding: bool = False


@dataclass(slots=True)
class Engine:
    """An awake replica. `advance` brings it to a time; everything else happens at that time."""

    model: EngineModel
    now_s: float
    usage: Usage = field(default_factory=Usage)
    _runs: dict[SequenceId, _Run] = field(default_factory=dict)
    _ends: list[tuple[float, int, _Run]] = field(default_factory=list)
    _preempted: deque[_Run] = field(default_factory=deque)
    _num_decoding: int = 0
    _tok: float = 0.0
    _steps: float = 0.0
    _prefill_s: float = 0.0
    _refresh_s: float = 0.0
    _num_joined: int = 0

    def advance(self, now_s: float) -> None:
        """Let time pass. Never past `next_event_s`."""
        left = now_s - self.now_s
        self.now_s = now_s
        if left <= 0.0:
            return
        usage = self.usage
        if self._refresh_s > 0.0:
            used = min(left, self._refresh_s)
            self._refresh_s -= used
            usage.refresh_s += used
            left -= used
        if self._prefill_s > 0.0:
            used = min(left, self._prefill_s)
            self._prefill_s -= used
            usage.prefill_s += used
            left -= used
        if left <= 0.0:
            return
        n = self._num_decoding
        if n == 0:
            usage.idle_s += left
            return
        a = self.model.throughput.attention_s_per_token
        overhead = self.model.throughput.overhead_s(n)
        per_step = overhead + a * self._tok
        slope = a * n
        x = 2.0 * left / (per_step + sqrt(per_step * per_step + 2.0 * slope * left))
        self._steps += x
        self._tok += n * x
        usage.decode_s += left
        usage.underfilled_s += x * (overhead - n * self.model.best_overhead_s)
        usage.tokens += n * x

    def next_event_s(self) -> float:
        """When a sequence finishes or the cache is full; infinite without sequences."""
        n = self._num_decoding
        if n == 0:
            return inf
        self._drop_stale_ends()
        x = self._ends[0][0] - self._steps
        if n > 1:
            x = min(x, (self.model.kv_capacity_tokens - self._tok) / n)
        x = max(0.0, x)
        a = self.model.throughput.attention_s_per_token
        per_step = self.model.throughput.overhead_s(n) + a * self._tok
        return self.now_s + self._refresh_s + self._prefill_s + x * per_step + a * n * x * x / 2.0

    def run(self, sequence: SequenceId, attempt: int, length: int, generated: int, remaining: int) -> None:
        """Start a sequence of `length` resident tokens that will generate `remaining` more."""
        run = _Run(sequence, attempt, length, generated, max(1, remaining))
        self._runs[sequence] = run
        self._join(run)

    def _join(self, run: _Run) -> None:
        run.joined_steps = self._steps
        run.order = self._num_joined
        run.is_decoding = True
        self._num_joined += 1
        self._num_decoding += 1
        self._tok += run.length
        self._prefill_s += run.length * self.model.prefill_s_per_token
        heapq.heappush(self._ends, (self._steps + run.remaining, run.order, run))

    def _leave(self, run: _Run) -> None:
        """Off the batch, with the tokens it has generated since it joined."""
        grown = self._steps - run.joined_steps
        self._tok = self._tok - run.length - grown if self._num_decoding > 1 else 0.0
        done = min(run.remaining, int(grown + _EPSILON_STEPS))
        run.length += done
        run.generated += done
        run.remaining -= done
        run.is_decoding = False
        self._num_decoding -= 1

    def abort(self, sequence: SequenceId) -> tuple[int, int] | None:
        """Stop a sequence: its attempt and tokens generated in all; None if it is not here."""
        run = self._runs.pop(sequence, None)
        if run is None:
            return None
        if run.is_decoding:
            self._leave(run)
        else:
            self._preempted.remove(run)
        self._readmit()
        return run.attempt, run.generated

    def settle(self) -> list[tuple[SequenceId, int, int]]:
        """At `next_event_s`: what has finished (sequence, attempt, tokens); then the cache is made to fit."""
        finished = []
        while self._num_decoding:
            self._drop_stale_ends()
            if self._ends[0][0] > self._steps + _EPSILON_STEPS:
                break
            run = heapq.heappop(self._ends)[2]
            total = run.generated + run.remaining
            self._leave(run)
            del self._runs[run.sequence]
            finished.append((run.sequence, run.attempt, total))
        while self._num_decoding > 1 and self._tok > self.model.kv_capacity_tokens - self._num_decoding:
            youngest = max((r for r in self._runs.values() if r.is_decoding), key=lambda r: r.order)
            self._leave(youngest)
            self._preempted.appendleft(youngest)
            self.usage.num_preemptions += 1
        if finished:
            self._readmit()
        return finished

    def _readmit(self) -> None:
        while self._preempted:
            run = self._preempted[0]
            if (
                self._num_decoding
                and self._tok + run.length + _REJOIN_ROOM_TOKENS > self.model.kv_capacity_tokens
            ):
                return
            self._preempted.popleft()
            self._join(run)

    def _drop_stale_ends(self) -> None:
        ends = self._ends
        while ends and not (ends[0][2].is_decoding and ends[0][2].order == ends[0][1]):
            heapq.heappop(ends)

    def refresh(self, seconds: float) -> None:
        """Generation pauses for `seconds` while new weights are read; the cache is kept."""
        self._refresh_s += seconds

    def progress(self) -> list[tuple[SequenceId, int, int]]:
        """All sequences with their attempt and tokens generated in all."""
        steps = self._steps + _EPSILON_STEPS
        return [
            (
                run.sequence,
                run.attempt,
                run.generated + min(run.remaining, int(steps - run.joined_steps))
                if run.is_decoding
                else run.generated,
            )
            for run in self._runs.values()
        ]

    def sequences(self) -> list[SequenceId]:
        return list(self._runs)

    @property
    def num_sequences(self) -> int:
        return len(self._runs)
