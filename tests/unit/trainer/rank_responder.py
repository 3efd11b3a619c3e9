"""Ranks as the trainer meets them on the bus, without an engine: a peer, through the real codec."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shared.bus.memory_bus import MemoryBus
from shared.contracts.base import Done, Message
from shared.contracts.rank import (
    CheckpointSaved,
    LoadCheckpoint,
    RankMoved,
    RankStatus,
    RankStepped,
    RankWrote,
    SaveCheckpoint,
    StageSamples,
    TrainStep,
    WritePolicy,
)
from shared.contracts.subjects import Subjects
from shared.errors import EngineError, PivotError, TransportError

RESIDENT_BYTES, MOVED_BYTES, FREED_BYTES = 1000, 600, 200


class RankResponders:
    """`world_size` ranks. `calls` is what each was asked, in order; `gps_version` what their Writes made."""

    def __init__(self, bus: MemoryBus, subjects: Subjects, world_size: int) -> None:
        self._bus, self._subjects, self._world_size = bus, subjects, world_size
        self.calls: list[tuple[int, str]] = []
        self.staged: dict[int, list[str]] = {}
        self.trained: list[tuple[int, int, list[str]]] = []
        self.totals: list[int | None] = []
        """`total_response_tokens` of each train command."""
        self.gps_version = 0
        self.generation = "g1"
        self.phase = "waiting for load"
        self.hold: dict[str, asyncio.Event] = {}
        """A command that is named here ("write", or "write 1" of rank 1 alone) waits for its event."""
        self.fail: dict[str, int] = {}
        """A command that is named here fails this many times on rank 0."""
        self.errors: dict[str, list[PivotError]] = {}
        """What rank 0 answers, one after another, to a command that is named here; nothing is done."""
        self.lost_answers: dict[str, int] = {}
        """So many answers of rank 0 to a command that is named here are lost on their way; it is done."""
        self.saved: list[str] = []
        self.loaded: list[str] = []
        self._wrote: set[int] = set()

    async def start(self) -> None:
        handlers: dict[str, Callable[[int, Any], Message]] = {
            "load": self._load,
            "stage": self._stage,
            "train": self._train,
            "write": self._write,
            "offload": self._move,
            "reload": self._move,
            "save": self._save,
        }
        for rank in range(self._world_size):
            for name, handler in handlers.items():
                await self._bus.serve(self._subjects.rank(rank, name), self._serving(rank, name, handler))

    async def report(self) -> None:
        """One heartbeat of every rank."""
        for rank in range(self._world_size):
            await self._bus.publish(self._subjects.rank(rank, "status"), self._status(rank))

    def count(self, command: str) -> int:
        return sum(name == command for rank, name in self.calls if rank == 0)

    def _serving(
        self, rank: int, name: str, handler: Callable[[int, Any], Message]
    ) -> Callable[[Message], Awaitable[Message]]:
        async def serve(message: Message) -> Message:
            self.calls.append((rank, name))
            if (gate := self.hold.get(f"{name} {rank}", self.hold.get(name))) is not None:
                await gate.wait()
            if rank == 0 and self.fail.get(name, 0) > 0:
                self.fail[name] -= 1
                raise EngineError(f"rank 0 failed in {name}", phase=name)
            if rank == 0 and self.errors.get(name):
                raise self.errors[name].pop(0)
            answer = handler(rank, message)
            if rank == 0 and self.lost_answers.get(name, 0) > 0:
                self.lost_answers[name] -= 1
                raise TransportError("GPS cannot be reached")
            return answer

        return serve

    def _status(self, rank: int) -> RankStatus:
        return RankStatus(
            rank=rank,
            world_size=self._world_size,
            incarnation=f"{self.generation}/{rank}",
            phase=self.phase,
            step=0,
            resident_bytes=RESIDENT_BYTES,
            pid=1,
        )

    def _load(self, rank: int, message: LoadCheckpoint) -> Message:
        if rank == 0:
            self.loaded.append(message.tag)
        return self._status(rank)

    def _stage(self, rank: int, message: StageSamples) -> Message:
        if message.part == 0:
            self.staged[rank] = []
        self.staged[rank] += [s.sample_id for s in message.samples]
        return Done()

    def _train(self, rank: int, message: TrainStep) -> Message:
        self.trained.append((message.step, rank, self.staged[rank]))
        if rank == 0:
            self.totals.append(message.total_response_tokens)
        takes_step = message.total_response_tokens is not None
        return RankStepped(
            rank=rank,
            step=message.step,
            loss_sum=0.25,
            grad_norm=2.0 if takes_step else 0.0,
            tokens=100,
            response_tokens=10,
            logprob_gap_sum=0.5,
            logprob_gap_max=0.1 * (rank + 1),
            importance_ratio_max=1.1,
            clipped_tokens=1,
            duration_s=0.5,
        )

    def _write(self, rank: int, message: WritePolicy) -> Message:
        """The last rank to write commits."""
        self._wrote.add(rank)
        is_last = len(self._wrote) == self._world_size
        if is_last:
            self.gps_version = message.version
            self._wrote.clear()
        return RankWrote(rank=rank, version=message.version, nbytes=10, committed=is_last, duration_s=0.1)

    def _move(self, rank: int, message: Message) -> Message:
        return RankMoved(
            rank=rank,
            moved_bytes=MOVED_BYTES,
            resident_bytes=RESIDENT_BYTES,
            duration_s=0.1,
            freed_bytes=FREED_BYTES,
        )

    def _save(self, rank: int, message: SaveCheckpoint) -> Message:
        if rank == 0:
            self.saved.append(message.tag)
        return CheckpointSaved(rank=rank, tag=message.tag, duration_s=0.1)
