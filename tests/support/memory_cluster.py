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
from services.gps.membership import serving
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
from tests.support.gps_cluster import HALVES, TOKEN, write_checkpoint


class MemoryCluster:
    """Started nodes: their services, apps and clients by number."""

    def __init__(self, folder: RunFolder, make: Callable[[str], Transport], settings: dict[str, Any]) -> None:
        self.folder, self.bus = folder, MemoryBus()
        self.cut = HALVES
        """The run's `cluster` section for nodes that start from now on."""
        self.run = f"mem{uuid4().hex[:8]}"
        self.services: dict[int, ClusterService] = {}
        self.http: dict[int, httpx.AsyncClient] = {}
        self.clients: dict[int, GpsClient] = {}
        self._contexts: dict[int, ServiceContext] = {}
        self._make, self._settings = make, settings

    async def start(self, node: int, num_nodes: int) -> None:
        """Start `node` of a cluster that is configured with `num_nodes`."""
        model = str(self.folder.path.parent / "model")
        gps = {"nodes": [f"127.0.0.{1 + n}" for n in range(num_nodes)], **self._settings}
        config = RunConfig.model_validate(
            {
                "run": {"name": self.run, "folder": str(self.folder.path)},
                "models": {"policy": model, "genrm": model},
                "cluster": self.cut,
                "gps": gps,
            }
        )
        ctx = ServiceContext(
            name="gps",
            config=config,
            endpoints=Endpoints("", "", "127.0.0.1", {"gps": 0}, TOKEN),
            folder=self.folder,
            bus=self.bus,
            subjects=Subjects(self.run),
            clock=SystemClock(),
            log=logging.getLogger("pivotrl.gps"),
            exits=contextlib.AsyncExitStack(),
            metrics=Metrics("gps"),
            node=node,
        )
        self._contexts[node] = ctx
        assert config.gps is not None
        service = await open_cluster(ctx, config.gps, make=self._make)
        app = make_app(
            "gps", token=TOKEN, routers=[gps_router(service, self.folder)], ready=service.waits_for
        )
        self.services[node] = service
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.http[node] = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://gps", headers=headers
        )
        self.clients[node] = GpsClient(
            "http://gps", token=TOKEN, transport=httpx.ASGITransport(app), deadline_s=20
        )

    async def until_serving(self) -> None:
        """Every started node serves, and every one knows it of all others."""
        started = set(self.services)
        for node, ctx in self._contexts.items():
            service = self.services[node]
            await ctx.until_true(lambda service=service: service.waits_for() is None)  # type: ignore[misc]
            view = service.holder.cluster
            await ctx.until_true(lambda view=view: started <= set(serving(view.view)))  # type: ignore[misc]

    async def stop(self, node: int) -> None:
        """Stop a node; it says goodbye."""
        await self.clients.pop(node).close()
        await self.http.pop(node).aclose()
        del self.services[node]
        await self._contexts.pop(node)._close()

    async def close(self) -> None:
        for node in list(self.services):
            await self.stop(node)
        await self.bus.close()


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
    settings = {"transport": "any", "node_bytes": node_bytes, "heartbeat_s": 0.02, "dead_after_s": 5.0, **gps}
    made = MemoryCluster(run_folder, make, settings)
    try:
        for node in range(num_nodes):
            await made.start(node, num_nodes)
        await made.until_serving()
        yield made
    finally:
        await made.close()
