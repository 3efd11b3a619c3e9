"""What a replica says about itself four times a second: load, speed, version, memory. Also its heartbeat."""

import asyncio
import collections
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.contracts.replica import ReplicaState, ReplicaTelemetry
from shared.errors import PivotError
from shared.ids import ReplicaId, Role
from shared.inference.ports import LoadSnapshot

TELEMETRY_INTERVAL_S = 0.25
RATE_WINDOW_S = 2.0
"""tokens/s is the mean over this much of the past."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Who speaks. `incarnation` changes with every process start."""

    replica_id: ReplicaId
    role: Role
    devices: tuple[int, ...]
    incarnation: str


class Telemetry:
    """Counts generated tokens and turns a snapshot into a message."""

    def __init__(self, identity: ReplicaIdentity, clock: Callable[[], float]) -> None:
        self._identity, self._clock = identity, clock
        self._generated_tokens = 0
        self._seen: collections.deque[tuple[float, int]] = collections.deque([(clock(), 0)])

    def count(self, tokens: int) -> None:
        self._generated_tokens += tokens

    def message(self, state: ReplicaState, version: int, snapshot: LoadSnapshot) -> ReplicaTelemetry:
        identity = self._identity
        return ReplicaTelemetry(
            replica_id=identity.replica_id,
            role=identity.role,
            incarnation=identity.incarnation,
            pid=os.getpid(),
            state=state,
            devices=identity.devices,
            num_running=snapshot.num_running,
            lengths=snapshot.lengths,
            kv_capacity_tokens=snapshot.kv_capacity_tokens,
            tokens_per_s=self._tokens_per_s(),
            step_latency_s=snapshot.step_latency_s,
            generated_tokens_total=self._generated_tokens,
            policy_version=version,
            resident_bytes=snapshot.resident_bytes,
        )

    def _tokens_per_s(self) -> float:
        now = self._clock()
        self._seen.append((now, self._generated_tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_WINDOW_S:
            self._seen.popleft()
        since, tokens = self._seen[0]
        return (self._generated_tokens - tokens) / (now - since) if now > since else 0.0


async def send_forever(
    message: Callable[[], ReplicaTelemetry], publish: Callable[[ReplicaTelemetry], Awaitable[None]]
) -> None:
    """A message every `TELEMETRY_INTERVAL_S`. One that is not accepted is logged and dropped."""
    while True:
        try:
            await publish(message())
        except PivotError as error:
            log.warning("telemetry not sent: %s", error)
        await asyncio.sleep(TELEMETRY_INTERVAL_S)
