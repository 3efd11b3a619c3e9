"""Composition root of a replica worker: one engine on its devices, joined to the bus and the node's GPS."""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from shared.bus.process import ServiceContext, run_process
from shared.contracts.base import Message
from shared.contracts.gps import ReadGrant, ReadRequest
from shared.contracts.replica import (
    AbortSequences,
    RefreshReplica,
    ReplicaTelemetry,
    RunSequences,
    SequenceProgress,
    SleepReplica,
    WakeReplica,
)
from shared.errors import WireError
from shared.ids import ReplicaId, Role
from shared.inference.engines.vllm_config import VllmEngineConfig
from shared.inference.engines.vllm_engine import VllmEngine
from shared.inference.ports import Engine
from shared.inference.replica import ReplicaWorker
from shared.planning.cluster import ReplicaSlot
from shared.runtime.config import DTYPE, MAX_SEQUENCES_PER_REPLICA, RunConfig
from shared.runtime.models import model_folder
from shared.runtime.profiles import model_spec
from shared.runtime.topology import cluster_of
from shared.weights.gps_client import GpsClient

C = TypeVar("C", bound=Message)
READ_WAIT_S = 60.0
READ_LEASE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="pivotrl replica")
    parser.add_argument("--replica", required=True, help="for example rollout-0")
    known, _ = parser.parse_known_args()
    replica = ReplicaId(known.replica)
    run_process(replica, lambda ctx: serve_replica(ctx, replica))


async def serve_replica(ctx: ServiceContext, replica: ReplicaId) -> None:
    slot = cluster_of(ctx.config).slot(replica)
    engine = VllmEngine(
        engine_config(ctx.config, slot, model_folder(model_spec(ctx.config, slot.role), ctx.folder))
    )
    gps = GpsClient(ctx.gps_url, token=ctx.token, name=replica)
    ctx.exits.push_async_callback(gps.close)

    async def publish_progress(message: SequenceProgress) -> None:
        await ctx.bus.append(ctx.subjects.progress(slot.role, replica), message)

    async def publish_telemetry(message: ReplicaTelemetry) -> None:
        await ctx.bus.publish(ctx.subjects.telemetry(slot.role, replica), message)

    worker = ReplicaWorker(
        replica_id=replica,
        role=slot.role,
        devices=sorted(slot.devices),
        engine=engine,
        weights=GpsSource(gps, "policy" if slot.role is Role.ROLLOUT else "genrm", replica, engine),
        publish_progress=publish_progress,
        publish_telemetry=publish_telemetry,
        incarnation=secrets.token_hex(6),
        clock=ctx.clock.now_s,
    )
    life = ctx.spawn(worker.run_forever(), "engine")
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait(
        [life, ready, stopping := asyncio.create_task(ctx.stopped())], return_when=asyncio.FIRST_COMPLETED
    )
    ready.cancel()
    stopping.cancel()
    if worker.ready.is_set():
        await _serve(ctx, replica, worker)
        ctx.ready()
    with contextlib.suppress(asyncio.CancelledError):
        await ctx.stopped()
    # The engine's own teardown takes seconds and leaves nothing that the kernel does not take back.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(ctx: ServiceContext, replica: ReplicaId, worker: ReplicaWorker) -> None:
    commands: list[tuple[str, Callable[[Message], Awaitable[Message]]]] = [
        ("run", _typed(RunSequences, worker.run)),
        ("abort", _typed(AbortSequences, worker.abort)),
        ("sleep", _typed(SleepReplica, worker.sleep)),
        ("wake", _typed(WakeReplica, worker.wake)),
        ("refresh", _typed(RefreshReplica, worker.refresh)),
    ]
    for name, handler in commands:
        await ctx.bus.serve(ctx.subjects.replica(replica, name), handler)


def _typed(
    kind: type[C], handler: Callable[[C], Awaitable[Message]]
) -> Callable[[Message], Awaitable[Message]]:
    async def call(message: Message) -> Message:
        if not isinstance(message, kind):
            raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
        return await handler(message)

    return call


class GpsSource:
    """Read(M, G, P) for one replica: the engine's own layout, over a lease."""

    def __init__(self, client: GpsClient, model: str, receiver: str, engine: Engine) -> None:
        self._client, self._model, self._receiver, self._engine = client, model, receiver, engine

    def read(self, min_version: int) -> AbstractAsyncContextManager[ReadGrant]:
        return self._read(min_version)

    @asynccontextmanager
    async def _read(self, min_version: int) -> AsyncIterator[ReadGrant]:
        request = ReadRequest(
            model=self._model,
            receiver=self._receiver,
            min_version=min_version,
            boxes=self._engine.layout(),
            lease_s=READ_LEASE_S,
            wait_s=READ_WAIT_S,
        )
        async with self._client.read(request) as grant:
            yield grant


def engine_config(config: RunConfig, slot: ReplicaSlot, model: Path) -> VllmEngineConfig:
    is_cpu = config.cluster.kind == "cpu"
    tp = config.tensor_parallel(slot.role)
    return VllmEngineConfig(
        model=str(model),
        kv_cache_memory_bytes=config.cluster.kv_tokens * kv_bytes_per_token(model) // tp,
        max_model_len=config.max_model_len,
        max_num_seqs=MAX_SEQUENCES_PER_REPLICA,
        device="cpu" if is_cpu else "cuda",
        tensor_parallel_size=tp,
        dtype=DTYPE,
        seed=config.run.seed,
        cpu_cores=str(min(slot.devices) % (os.cpu_count() or 1)) if is_cpu else "",
    )


def kv_bytes_per_token(model: Path) -> int:
    """Keys and values of one token over all layers, two bytes an element."""
    values = json.loads((model / "config.json").read_text())
    heads = values.get("num_key_value_heads") or values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return 2 * int(values["num_hidden_layers"]) * int(heads) * int(head_dim) * 2


if __name__ == "__main__":
    main()
