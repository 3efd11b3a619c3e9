"""GPS nodes inside one process, for what needs no network: in-memory bus, copies through the mapped pool."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from services.gps.api import gps_router
from services.gps.cluster import ClusterService
from services.gps.cluster_app import open_cluster
from shared.bus.memory_bus import MemoryBus
from shared.bus.process import ServiceContext
from shared.contracts.subjects import Subjects
from shared.runtime.clock import SystemClock
from shared.runtime.config import RunConfig
from shared.runtime.http import make_app
from shared.runtime.metrics import Metrics
from shared.runtime.run_folder import Endpoints, RunFolder
from shared.weights.gps_client import GpsClient
from shared.weights.memory_transport import MemoryTransport
from shared.weights.ports import Transport
from tests.support.gps_cluster import TOKEN, write_checkpoint


class MemoryCluster:
    """Started nodes: their services, apps and clients by number."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.services: dict[int, ClusterService] = {}
        self.http: dict[int, httpx.AsyncClient] = {}
        self.clients: dict[int, GpsClient] = {}


@contextlib.asynccontextmanager
async def memory_cluster(
    folder: Path,
    num_nodes: int,
    *,
    node_bytes: int,
    make: Callable[[str], Transport] = MemoryTransport,
    **gps: Any,
) -> AsyncIterator[MemoryCluster]:
    """`num_nodes` nodes that all serve when the block begins; `make` opens an agent's transport."""
    write_checkpoint(folder / "model")
    run_folder = RunFolder(folder / "run")
    run_folder.create()
    run = f"mem{uuid4().hex[:8]}"
    config = RunConfig.model_validate(
        {
            "run": {"name": run, "folder": str(run_folder.path)},
            "models": {"policy": str(folder / "model"), "genrm": str(folder / "model")},
            "gps": {
                "nodes": [f"127.0.0.{1 + node}" for node in range(num_nodes)],
                "transport": "any",
                "node_bytes": node_bytes,
                "heartbeat_s": 0.02,
                "dead_after_s": 5.0,
                **gps,
            },
        }
    )
    bus, made = MemoryBus(), MemoryCluster(run_folder)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        contexts = []
        for node in range(num_nodes):
            ctx = ServiceContext(
                name="gps",
                config=config,
                endpoints=Endpoints("", "", "127.0.0.1", {"gps": 0}, TOKEN),
                folder=run_folder,
                bus=bus,
                subjects=Subjects(run),
                clock=SystemClock(),
                log=logging.getLogger("pivotrl.gps"),
                exits=contextlib.AsyncExitStack(),
                metrics=Metrics("gps"),
                node=node,
            )
            stack.push_async_callback(ctx._close)
            contexts.append(ctx)
            assert config.gps is not None
            service = await open_cluster(ctx, config.gps, make=make)
            app = make_app(
                "gps", token=TOKEN, routers=[gps_router(service, run_folder)], ready=service.waits_for
            )
            made.services[node] = service
            headers = {"Authorization": f"Bearer {TOKEN}"}
            made.http[node] = httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://gps", headers=headers
            )
            stack.push_async_callback(made.http[node].aclose)
            made.clients[node] = GpsClient(
                "http://gps", token=TOKEN, transport=httpx.ASGITransport(app), deadline_s=20
            )
            stack.push_async_callback(made.clients[node].close)
        for ctx, service in zip(contexts, made.services.values(), strict=True):
            await ctx.until_true(lambda service=service: service.waits_for() is None)  # type: ignore[misc]
        yield made
