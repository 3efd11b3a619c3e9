"""A rank worker: `python -m services.trainer.rank --run FOLDER --rank N`."""

import argparse
import asyncio
import contextlib
import os
import sys
import warnings
from typing import NoReturn

from services.trainer.lane import Lane
from services.trainer.rank_shell import MeasuredBackend, RankShell
from services.trainer.rendezvous import meet
from shared.bus.process import ServiceContext, run_process
from shared.errors import PivotError
from shared.runtime.models import model_folder
from shared.runtime.topology import rank_devices
from shared.weights.gps_client import GpsClient

MEET_DEADLINE_S = 300.0
CLOSE_GRACE_S = 1.5
GPS_DEADLINE_S = 180.0
"""The last writer's commit is answered when GPS has checksummed the whole version."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="pivotrl rank")
    parser.add_argument("--rank", type=int, required=True, help="this rank's number")
    known, _ = parser.parse_known_args()
    run_process(f"rank-{known.rank}", lambda ctx: serve_rank(ctx, known.rank))


async def serve_rank(ctx: ServiceContext, rank: int) -> None:
    world_size = len(rank_devices(ctx.config))
    lane = Lane(f"engine of rank {rank}")
    starting = asyncio.create_task(lane.call(_start, ctx, rank, world_size))
    stopping = asyncio.create_task(ctx.stopped())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        _leave(0)
    generation, backend = starting.result()

    def on_broken(error: PivotError) -> None:
        ctx.log.error("this life of the ranks is over: %s", error.message)
        _leave(1)

    gps = GpsClient(ctx.gps_url, token=ctx.token, name=f"rank-{rank}", deadline_s=GPS_DEADLINE_S)
    shell = RankShell(
        rank=rank,
        world_size=world_size,
        incarnation=f"{generation}/{rank}",
        backend=backend,
        lane=lane,
        gps=gps,
        bus=ctx.bus,
        subjects=ctx.subjects,
        clock=ctx.clock,
        on_broken=on_broken,
        is_pinning=ctx.config.cluster.kind == "cuda",
    )
    await shell.serve()
    ctx.spawn(shell.report_for_ever(), "heartbeat")
    ctx.ready()
    try:
        await stopping
    except Exception:
        ctx.log.exception("rank %d ends", rank)
        _leave(1)
    if lane.is_idle:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(lane.call(backend.close)), CLOSE_GRACE_S)
    _leave(0)


def _start(ctx: ServiceContext, rank: int, world_size: int) -> tuple[str, MeasuredBackend]:
    """On the engine's thread: imports torch and DeepSpeed (seconds), then meets the other ranks."""
    # DeepSpeed calls collectives by their old names, which torch says again at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    from services.trainer.deepspeed_backend import BackendConfig, DeepSpeedBackend

    config = ctx.config
    generation, store = meet(ctx.folder.processes, rank, world_size, deadline_s=MEET_DEADLINE_S)
    backend_config = BackendConfig(
        model=model_folder(config.models.policy, ctx.folder),
        checkpoints=ctx.folder.checkpoints,
        kind=config.cluster.kind,
        rank=rank,
        world_size=world_size,
        seed=config.run.seed,
        learning_rate=config.training.learning_rate,
        clip_low=config.training.clip[0],
        clip_high=config.training.clip[1],
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.training.micro_batch_tokens,
    )
    return generation, DeepSpeedBackend(backend_config, store)


def _leave(code: int) -> NoReturn:
    """Ends the process now: a thread in a collective, or a library's own teardown, may never come back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
