"""A rank's shell: commands of the trainer in, calls of its engine out, a heartbeat beside.

One command runs at a time, in the order they came. An engine call that fails leaves the ranks out of step
(the others may be waiting in a collective), so the error is answered and the process ends; the supervisor
brings all ranks back together, and the trainer loads them from the last checkpoint. What fails outside the
engine (GPS is away, a request that makes no sense) is answered only.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from services.trainer.lane import Lane
from services.trainer.ports import TrainBackend
from services.trainer.rank_group import AWAITS_LOAD, OFFLOADED
from shared.bus.ports import Bus
from shared.contracts.base import Done, Message
from shared.contracts.gps import PoolView, ReadRequest, WriteCommit, WriteRequest
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
from shared.errors import (
    BusError,
    Conflict,
    EngineError,
    InvalidRequest,
    LayoutError,
    NotFound,
    PivotError,
    UserError,
    WireError,
)
from shared.runtime.clock import Clock
from shared.weights.dtypes import itemsize_of
from shared.weights.gps_client import GpsClient
from shared.weights.host_pool import MappedPool
from shared.weights.pool_reader import PoolReader

T = TypeVar("T")
C = TypeVar("C", bound=Message)
log = logging.getLogger("pivotrl.rank")
POLICY = "policy"
READ_LEASE_S = 300.0
HEARTBEAT_S = 1.0
ANSWER_GRACE_S = 0.5
"""Time for the answer to reach the bus before the process ends."""


class MeasuredBackend(TrainBackend, Protocol):
    def resident_bytes(self) -> int:
        """Memory of the device that this process takes now. May be called from any thread."""


class RankShell:
    """`incarnation` is `<generation>/<rank>`; the ranks of one life share the generation. `on_broken` is
    called once, after the engine failed and the caller was told. `is_pinning`: GPS's memory is mapped once,
    pinned for CUDA; without, it is mapped for each Read and Write, so that it is not counted as this
    process's own."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        incarnation: str,
        backend: MeasuredBackend,
        lane: Lane,
        gps: GpsClient,
        bus: Bus,
        subjects: Subjects,
        clock: Clock,
        on_broken: Callable[[PivotError], None],
        *,
        is_pinning: bool = False,
    ) -> None:
        self._rank, self._world_size, self._incarnation = rank, world_size, incarnation
        self._backend, self._lane, self._gps = backend, lane, gps
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self._on_broken = on_broken
        self._pools, self._is_pinning = PoolReader(is_pinning=is_pinning), is_pinning
        self._one_at_a_time = asyncio.Lock()
        self._staged: dict[int, StageSamples] = {}
        self._phase = AWAITS_LOAD
        self._changed = asyncio.Event()

    async def serve(self) -> None:
        commands: list[tuple[str, Callable[[Message], Awaitable[Message]]]] = [
            ("load", self._handler(LoadCheckpoint, self._load, "loading")),
            ("stage", self._handler(StageSamples, self._stage, "")),
            ("train", self._handler(TrainStep, self._train, "training")),
            ("write", self._handler(WritePolicy, self._write, "writing")),
            ("offload", self._handler(OffloadStates, self._offload, "offloading")),
            ("reload", self._handler(ReloadStates, self._reload, "reloading")),
            ("save", self._handler(SaveCheckpoint, self._save, "saving")),
        ]
        for name, handler in commands:
            await self._bus.serve(self._subjects.rank(self._rank, name), handler)

    def status(self) -> RankStatus:
        return RankStatus(
            rank=self._rank,
            world_size=self._world_size,
            incarnation=self._incarnation,
            phase=self._phase,
            step=self._backend.step,
            resident_bytes=self._backend.resident_bytes(),
            pid=os.getpid(),
        )

    async def report_for_ever(self) -> None:
        """The heartbeat; also at once when the phase changes."""
        while True:
            self._changed.clear()
            await self._bus.publish(self._subjects.rank(self._rank, "status"), self.status())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()

    def _set(self, phase: str) -> None:
        self._phase = phase
        self._changed.set()

    def _resting_phase(self) -> str:
        if not self._backend.is_built:
            return AWAITS_LOAD
        return OFFLOADED if self._backend.is_offloaded else "on device"

    def _handler(
        self, kind: type[C], command: Callable[[C], Awaitable[Message]], phase: str
    ) -> Callable[[Message], Awaitable[Message]]:
        async def handle(message: Message) -> Message:
            if not isinstance(message, kind):
                raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
            async with self._one_at_a_time:
                if phase:
                    self._set(phase)
                try:
                    return await command(message)
                finally:
                    self._set(self._resting_phase())

        return handle

    async def _call(self, phase: str, work: Callable[..., T], *args: object) -> T:
        """A call of the engine. Raises the engine's refusals as they are (all ranks refuse alike), and
        EngineError for whatever else went wrong there: this life is then over."""
        try:
            return await self._lane.call(work, *args)
        except (UserError, LayoutError):
            raise
        except Exception as error:
            log.exception("the engine failed in %s", phase)
            text = error.message if isinstance(error, PivotError) else f"{type(error).__name__}: {error}"
            failure = EngineError(
                f"rank {self._rank} failed in {phase}: {text}", phase=phase, rank=self._rank
            )
            asyncio.get_running_loop().call_later(ANSWER_GRACE_S, self._on_broken, failure)
            raise failure from error

    # commands

    async def _load(self, message: LoadCheckpoint) -> Message:
        self._staged = {}
        if (
            self._backend.tag == message.tag
        ):  # the trainer restarted, not this rank; the states may stay offloaded
            return self.status()
        if not message.tag or not self._backend.is_built:
            async with self._policy() as (version, pool):
                if not message.tag and version != 0:
                    raise NotFound(
                        f"a run that begins needs version 0 in GPS, which holds version {version}: "
                        "the checkpoint of that version is missing",
                        version=version,
                    )
                await self._call("load", self._backend.build, pool)
        if message.tag:
            await self._call("load", self._backend.load, message.tag)
        return self.status()

    @contextlib.asynccontextmanager
    async def _policy(self) -> AsyncIterator[tuple[int, MappedPool]]:
        request = ReadRequest(model=POLICY, receiver=f"rank-{self._rank}", lease_s=READ_LEASE_S)
        async with self._gps.read(request) as grant:
            with self._mapped(grant.view) as pool:
                yield grant.version, pool

    @contextlib.contextmanager
    def _mapped(self, view: PoolView, *, writable: bool = False) -> Iterator[MappedPool]:
        pool = self._pools.map(view, writable=writable)
        try:
            yield pool
        finally:
            pool.close()
            if not self._is_pinning:
                self._pools.close()

    async def _stage(self, message: StageSamples) -> Message:
        if not 0 <= message.part < message.num_parts:
            raise InvalidRequest("part", f"{message.part} is not one of {message.num_parts}")
        if any((s.step, s.num_parts) != (message.step, message.num_parts) for s in self._staged.values()):
            self._staged = {}
        self._staged[message.part] = message
        return Done()

    def _staged_samples(self, step: int) -> list[TrainSample]:
        """Raises Conflict unless all parts of `step` are here."""
        parts = self._staged
        if (
            not parts
            or any(s.step != step for s in parts.values())
            or len(parts) != parts[min(parts)].num_parts
        ):
            raise Conflict(f"the samples of step {step} are not staged", step=step)
        return [sample for part in sorted(parts) for sample in parts[part].samples]

    async def _train(self, message: TrainStep) -> Message:
        self._check_built()
        if message.step < self._backend.step:
            raise Conflict(f"step {message.step} is trained: the policy is at version {self._backend.step}")
        samples = self._staged_samples(message.step)
        started_s = self._clock.now_s()
        stats = await self._call(
            "train",
            self._backend.train,
            message.step,
            samples,
            message.total_response_tokens,
            message.num_micro_batches,
        )
        self._staged = {}
        return RankStepped(
            rank=self._rank,
            step=message.step,
            loss_sum=stats.loss_sum,
            grad_norm=stats.grad_norm,
            tokens=stats.tokens,
            response_tokens=stats.response_tokens,
            logprob_gap_sum=stats.logprob_gap_sum,
            logprob_gap_max=stats.logprob_gap_max,
            importance_ratio_max=stats.importance_ratio_max,
            clipped_tokens=stats.clipped_tokens,
            duration_s=self._clock.now_s() - started_s,
        )

    async def _write(self, message: WritePolicy) -> Message:
        self._check_built()
        started_s = self._clock.now_s()
        boxes = self._backend.shard_boxes()
        writer = f"rank-{self._rank}"
        with contextlib.ExitStack() as mapped:
            with _gps_may_restart(message.version):
                grant = await self._gps.begin_write(
                    WriteRequest(
                        model=POLICY,
                        version=message.version,
                        writer=writer,
                        writers=tuple(f"rank-{rank}" for rank in range(self._world_size)),
                        boxes=boxes,
                        attempt=self._incarnation.split("/")[0],
                    )
                )
                pool = mapped.enter_context(self._mapped(grant.view, writable=True))
            checksums = await self._call("write", self._backend.copy_shard, pool)
            nbytes = sum(box.flat_count * itemsize_of(pool.tensor(box.tensor).dtype) for box in boxes)
        with _gps_may_restart(message.version):
            commit = WriteCommit(writer=writer, checksums=checksums)
            status = await self._gps.commit_write(grant.write_id, commit)
        return RankWrote(
            rank=self._rank,
            version=message.version,
            nbytes=nbytes,
            committed=status.committed,
            duration_s=self._clock.now_s() - started_s,
        )

    async def _offload(self, message: OffloadStates) -> Message:
        return await self._move("offload", self._backend.offload)

    async def _reload(self, message: ReloadStates) -> Message:
        return await self._move("reload", self._backend.reload)

    async def _move(self, phase: str, work: Callable[[], int]) -> Message:
        self._check_built()
        started_s = self._clock.now_s()
        before = self._backend.resident_bytes()
        moved = await self._call(phase, work)
        resident = self._backend.resident_bytes()
        return RankMoved(
            rank=self._rank,
            moved_bytes=moved,
            resident_bytes=resident,
            duration_s=self._clock.now_s() - started_s,
            freed_bytes=max(0, before - resident),
        )

    async def _save(self, message: SaveCheckpoint) -> Message:
        self._check_built()
        started_s = self._clock.now_s()
        await self._call("save", self._backend.save, message.tag)
        return CheckpointSaved(rank=self._rank, tag=message.tag, duration_s=self._clock.now_s() - started_s)

    def _check_built(self) -> None:
        if not self._backend.is_built:
            raise NotFound(f"rank {self._rank} holds no model: load one first", rank=self._rank)


@contextlib.contextmanager
def _gps_may_restart(version: int) -> Iterator[None]:
    """A GPS that was restarted knows no Write, and no model until it has read it; one that lost the bus
    cannot tell how the Write ended. Both are a Conflict here: the Write may be tried again."""
    try:
        yield
    except (NotFound, BusError) as error:
        raise Conflict(
            f"the Write of version {version} broke off: {error.message}", version=version
        ) from error
