"""What every process of a run does the same: read the run, join the bus, say it is ready, stop on a signal.

async def main(ctx: ServiceContext) -> None:
    ...                          # subscribe, serve
    async with ctx.serve_http([router], ready=...):
        ctx.ready()
        await ctx.stopped()

run_process("gps", main)
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from shared.bus.nats_bus import connect
from shared.bus.ports import Bus
from shared.contracts.subjects import Subjects
from shared.errors import PivotError
from shared.runtime import logs
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.config import RunConfig
from shared.runtime.http import make_app, serving
from shared.runtime.metrics import Metrics
from shared.runtime.run_folder import Endpoints, RunFolder


@dataclass(slots=True)
class ServiceContext:
    """Everything a process is given. `exits` closes what `main` opened, last first."""

    name: str
    config: RunConfig
    endpoints: Endpoints
    folder: RunFolder
    bus: Bus
    subjects: Subjects
    clock: Clock
    log: logging.Logger
    exits: contextlib.AsyncExitStack
    metrics: Metrics
    node: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _failure: BaseException | None = None

    @property
    def token(self) -> str:
        return self.endpoints.token

    @property
    def gps_url(self) -> str:
        """The GPS of this node."""
        gps = self.config.gps
        if gps is None or self.node >= len(gps.nodes) or len(gps.nodes) == 1:
            return self.endpoints.http_url("gps")
        return f"http://{gps.nodes[self.node]}:{self.endpoints.http_ports['gps']}"

    async def stopped(self) -> None:
        """Returns on SIGTERM or SIGINT; raises what a task started by `spawn` died of."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def until_true(self, is_true: Callable[[], bool], every_s: float = 0.02) -> None:
        """Returns when `is_true`, or when the process is to stop; raises what a spawned task died of."""
        while not is_true() and not self._stop.is_set():
            try:
                async with asyncio.timeout(every_s):
                    await self._stop.wait()
            except TimeoutError:
                pass
        if self._failure is not None:
            raise self._failure

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that lives as long as the process. If it raises, the process ends with that error: the
        supervisor starts a fresh one, which is better than a half-living one."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("task %s died: %s", task.get_name(), error, exc_info=error)
            self._failure = self._failure or error
            self._stop.set()

    @contextlib.asynccontextmanager
    async def serve_http(
        self, routers: Sequence[APIRouter], *, ready: Callable[[], str | None], host: str | None = None
    ) -> AsyncIterator[int]:
        """Serve REST while the block runs, at `host` if it is not the run's; gives the port."""
        app = make_app(self.name, token=self.token, routers=routers, ready=ready, metrics=self.metrics)
        async with serving(app, host or self.endpoints.host, self.endpoints.http_ports[self.name]) as port:
            yield port

    def ready(self) -> None:
        """Tells the supervisor that this process can be used."""
        path = self.folder.ready_file(self.name, self.node)
        path.write_text(json.dumps({"pid": os.getpid(), "ready_s": self.clock.now_s()}))

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.exits.aclose()


def run_process(name: str, main: Callable[[ServiceContext], Awaitable[None]]) -> None:
    """The body of every `__main__`: `--run FOLDER`. Never returns."""
    parser = argparse.ArgumentParser(prog=f"pivotrl {name}")
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--node", type=int, default=0, help="this machine's number in the cluster")
    known, _ = parser.parse_known_args()
    logs.configure(name)
    try:
        asyncio.run(run_main(name, main, RunFolder(known.run), node=known.node))
    except PivotError as error:
        logging.getLogger("pivotrl").error("%s: %s", error.code, error.message)
        sys.exit(1)
    except Exception:
        logging.getLogger("pivotrl").exception("%s died", name)
        sys.exit(1)
    sys.exit(0)


async def run_main(
    name: str, main: Callable[[ServiceContext], Awaitable[None]], folder: RunFolder, *, node: int = 0
) -> None:
    config, endpoints = folder.read()
    subjects = Subjects(config.run.name)
    async with contextlib.AsyncExitStack() as exits:
        bus = await connect(endpoints.nats_url, token=endpoints.nats_token or None, name=name, timeout_s=30)
        exits.push_async_callback(bus.close)
        context = ServiceContext(
            name=name,
            config=config,
            endpoints=endpoints,
            folder=folder,
            bus=bus,
            subjects=subjects,
            clock=SystemClock(),
            log=logging.getLogger(f"pivotrl.{name}"),
            exits=exits,
            metrics=Metrics(name.split("-")[0].replace(".", "_")),
            node=node,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, context.stop)
        try:
            await main(context)
        finally:
            await context._close()
