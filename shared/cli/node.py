"""A run whose services are containers or pods: each process is one command of this program.

    init      once, before all others: checks, converts models, writes run.json and the NATS server's file
    node      on each machine with devices: its replicas and ranks, supervised
    follow    watches to the last step, then exports and reports, as `pivotrl run` does

What lies between, the services, is `python -m services.NAME --run FOLDER`.
"""

import asyncio
import signal
from typing import Any

from shared.bus.embedded_nats import write_server_config
from shared.cli.local_run import LocalRun, OnPhase
from shared.cli.preflight import require
from shared.cli.processes import node_specs
from shared.runtime.config import RunConfig
from shared.runtime.nodes import machine_of
from shared.runtime.run_folder import NATS_PORT, RunFolder, spread_endpoints
from shared.runtime.supervisor import Event, Supervisor


async def init(config: RunConfig, folder: RunFolder, address: str, on_phase: OnPhase) -> None:
    """What the processes of a spread run start from, on disk. Repeated, it keeps tokens and progress."""
    folder.create()
    previous = folder.read()[1] if folder.run_json.exists() else None
    endpoints = spread_endpoints(config, previous, address)
    await asyncio.to_thread(require, config, folder, endpoints, machine_of(config, 0))
    await LocalRun(config, folder, on_phase).prepare_models()
    if config.network.nats_url is None:
        write_server_config(folder.nats, host="0.0.0.0", port=NATS_PORT, token=endpoints.nats_token)
    folder.write(config, endpoints)


async def serve_node(folder: RunFolder, on_phase: OnPhase, node: int | None = None) -> None:
    """The replicas and ranks of this machine until SIGTERM; `node` as for `machine_of`.

    Raises:
        ConfigError: there is no such node.
        ProcessFailed: one cannot be kept alive.
    """
    config, _ = folder.read()
    ready: set[str] = set()
    specs = node_specs(config, folder, machine_of(config, node))

    def on_event(event: Event, name: str, detail: str) -> None:
        if event == "ready":
            ready.add(name)
        if event in ("starting", "ready"):
            on_phase("start", len(ready), len(specs), f"{name} {event} {detail}".strip())
        else:
            on_phase("event", 0, 0, f"{name} {event} {detail}".strip())

    supervisor = Supervisor(specs, folder.logs, on_event)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(_serve(supervisor))
    try:
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for task in (stopping, serving):
            task.cancel()
        await asyncio.gather(stopping, serving, return_exceptions=True)
        await supervisor.stop()


async def _serve(supervisor: Supervisor) -> None:
    await supervisor.start()
    raise await supervisor.failed()


async def follow(folder: RunFolder, on_phase: OnPhase) -> dict[str, Any]:
    """The summary of the run, written to its folder like the exported model and the report."""
    config, endpoints = folder.read()
    local = LocalRun(config, folder, on_phase)
    local.endpoints = endpoints
    await local.watch_steps()
    return await local.finish()
