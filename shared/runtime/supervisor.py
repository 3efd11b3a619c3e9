"""Starts the processes of a run on this machine in order, restarts what dies, and stops everything.

    wave 0   nats
    wave 1   gps, monitor, planner, rollout, reward        all at once, each says ready by a file
    wave 2…  replicas, one per device at a time; ranks together
    last     trainer

A member that dies comes back after a backoff; members of one `group` (the ranks of a process group cannot
live without each other) are stopped and come back together. More than `MAX_RESTARTS` in `RESTART_WINDOW_S`
end the run with the process named. `stop` sends SIGTERM to all, then SIGKILL to the process groups that
are left; a kernel death signal takes the children along if the supervisor itself is killed."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.errors import DeadlineExceeded, PivotError

MAX_RESTARTS = 5
RESTART_WINDOW_S = 120.0
TERM_GRACE_S = 5.0
BROKER_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. It is ready when `ready_file` holds its pid (None: at once)."""

    name: str
    argv: tuple[str, ...]
    wave: int
    chain: str = ""
    """Members of one wave and one chain start one after another."""
    group: str = ""
    env: tuple[tuple[str, str], ...] = ()
    ready_file: Path | None = None
    ready_deadline_s: float = 120.0
    is_broker: bool = False


Event = Literal["starting", "ready", "died", "restarting", "stopped"]
OnEvent = Callable[[Event, str, str], None]


class ProcessFailed(PivotError):
    """A process cannot be kept alive; `log` is where it says why."""

    code = "process_failed"


@dataclass(slots=True)
class _Member:
    spec: ProcessSpec
    process: asyncio.subprocess.Process | None = None
    watcher: asyncio.Task[None] | None = None
    deaths: deque[float] = field(default_factory=deque)


class Supervisor:
    def __init__(self, specs: Sequence[ProcessSpec], logs: Path, on_event: OnEvent = lambda *_: None) -> None:
        self._members = {spec.name: _Member(spec) for spec in specs}
        self._logs = logs
        self._on_event = on_event
        self._stopping = False
        self._failed: asyncio.Future[ProcessFailed] | None = None
        self._restarting: set[str] = set()
        self.num_restarts = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def pids(self) -> dict[str, int]:
        return {
            name: member.process.pid
            for name, member in self._members.items()
            if member.process is not None and member.process.returncode is None
        }

    async def start(self) -> None:
        """Returns when every process is ready.

        Raises:
            ProcessFailed: one died for good before it was ready.
            DeadlineExceeded: one was not ready in time.
        """
        self._failed = asyncio.get_running_loop().create_future()
        for wave in sorted({member.spec.wave for member in self._members.values()}):
            chains: dict[str, list[_Member]] = {}
            for member in self._members.values():
                if member.spec.wave == wave:
                    chains.setdefault(member.spec.chain or member.spec.name, []).append(member)
            await asyncio.gather(*(self._start_chain(chain) for chain in chains.values()))

    async def _start_chain(self, chain: list[_Member]) -> None:
        for member in chain:
            await self._spawn(member)
            await self._wait_ready(member)

    async def failed(self) -> ProcessFailed:
        """Waits until some process cannot be kept alive."""
        assert self._failed is not None, "start() first"
        return await self._failed

    async def stop(self) -> None:
        """Ends every process, in under ten seconds."""
        self._stopping = True
        workers = [m for m in self._members.values() if not m.spec.is_broker]
        brokers = [m for m in self._members.values() if m.spec.is_broker]
        await self._end(workers, TERM_GRACE_S)
        await self._end(brokers, BROKER_GRACE_S)
        for member in self._members.values():
            if member.watcher is not None:
                member.watcher.cancel()

    async def _end(self, members: list[_Member], grace_s: float) -> None:
        alive = [m for m in members if m.process is not None and m.process.returncode is None]
        for member in alive:
            _signal(member, signal.SIGTERM)
        if alive:
            await asyncio.wait([asyncio.create_task(_exit(m)) for m in alive], timeout=grace_s)
        for member in members:
            if member.process is not None:
                _signal(member, signal.SIGKILL)  # whatever is left of its process group
        for member in alive:
            await _exit(member)
            self._on_event("stopped", member.spec.name, "")

    async def _spawn(self, member: _Member) -> None:
        spec = member.spec
        if spec.ready_file is not None:
            spec.ready_file.unlink(missing_ok=True)
        with open(self._logs / f"{spec.name}.log", "ab") as log:  # noqa: ASYNC230  # local, and at once
            try:
                member.process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    env={**os.environ, **dict(spec.env)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise ProcessFailed(
                    f"{spec.name} cannot be started: {error}", process=spec.name, log=log.name
                ) from error
        self._on_event("starting", spec.name, "")
        if self._stopping:  # stop() did not see it
            _signal(member, signal.SIGKILL)
        member.watcher = asyncio.create_task(self._watch(member, member.process))

    async def _wait_ready(self, member: _Member) -> None:
        spec = member.spec
        loop = asyncio.get_running_loop()
        started = loop.time()
        while spec.ready_file is not None and not spec.ready_file.exists():
            if self._failed is not None and self._failed.done():
                raise self._failed.result()
            if self._stopping:
                return
            if loop.time() - started > spec.ready_deadline_s:
                raise DeadlineExceeded(
                    role="supervisor", peer=spec.name, phase="start", deadline_s=spec.ready_deadline_s
                )
            await asyncio.sleep(0.05)
        self._on_event("ready", spec.name, f"{loop.time() - started:.1f} s")

    async def _watch(self, member: _Member, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._stopping or member.process is not process:
            return
        name = member.spec.name
        self._on_event("died", name, _exit_text(code))
        now = asyncio.get_running_loop().time()
        member.deaths.append(now)
        while member.deaths and now - member.deaths[0] > RESTART_WINDOW_S:
            member.deaths.popleft()
        if len(member.deaths) > MAX_RESTARTS:
            log = self._logs / f"{name}.log"
            self._fail(
                ProcessFailed(
                    f"{name} died {len(member.deaths)} times in {RESTART_WINDOW_S:.0f} s "
                    f"({_exit_text(code)}); its log: {log}{_tail(log)}",
                    process=name,
                    log=str(log),
                )
            )
            return
        try:
            await self._restart(member)
        except ProcessFailed as error:
            self._fail(error)

    async def _restart(self, member: _Member) -> None:
        group = member.spec.group
        together = [m for m in self._members.values() if group and m.spec.group == group] or [member]
        key = group or member.spec.name
        if key in self._restarting:
            return
        self._restarting.add(key)
        try:
            for other in together:
                if other.process is not None and other.process.returncode is None:
                    doomed, other.process = other.process, None  # its watcher then knows that this was meant
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(doomed.pid, signal.SIGKILL)
                    await doomed.wait()
            await asyncio.sleep(min(8.0, 0.25 * 2 ** len(member.deaths)))
            for other in together:
                if self._stopping:
                    return
                self.num_restarts += 1
                self._on_event("restarting", other.spec.name, "")
                await self._spawn(other)
        finally:
            self._restarting.discard(key)
        for other in together:  # one that died while the rest were starting was left to this call
            if other.process is not None and other.process.returncode is not None:
                await self._restart(other)
                return

    def _fail(self, error: ProcessFailed) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(error)


async def _exit(member: _Member) -> None:
    if member.process is not None:
        await member.process.wait()


def _signal(member: _Member, number: signal.Signals) -> None:
    assert member.process is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(member.process.pid, number)


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the parent is gone, however that came about."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(log: Path, lines: int = 5) -> str:
    with contextlib.suppress(OSError):
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4000))
            last = file.read().decode(errors="replace").splitlines()[-lines:]
        return "\n  " + "\n  ".join(last)
    return ""
