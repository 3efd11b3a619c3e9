"""Composition root of the trainer."""

import asyncio

from services.trainer.api import trainer_router
from services.trainer.rank_group import RankGroup
from services.trainer.service import TrainerService
from shared.bus.process import ServiceContext
from shared.runtime.checkpoints import Checkpoints
from shared.runtime.journal import Journal
from shared.runtime.models import model_folder
from shared.runtime.topology import rank_devices
from shared.weights.gps_client import GpsClient


async def main(ctx: ServiceContext) -> None:
    config = ctx.config
    gps = GpsClient(ctx.gps_url, token=ctx.token, name="trainer")
    ctx.exits.push_async_callback(gps.close)
    journal = Journal(ctx.folder.journal / "trainer.jsonl")
    ctx.exits.callback(journal.close)
    ranks = RankGroup(len(rank_devices(config)), ctx.bus, ctx.subjects, ctx.clock)

    async def gps_version() -> int:
        return (await gps.model("policy")).version

    service = TrainerService(
        config,
        ranks,
        Checkpoints(ctx.folder.checkpoints),
        journal,
        gps_version,
        ctx.bus,
        ctx.subjects,
        ctx.clock,
    )
    ctx.metrics.add_source(service.gauges)
    await service.start()
    ctx.spawn(ranks.watch_for_ever(), "watch ranks")
    ctx.spawn(service.run_for_ever(), "train")
    ctx.spawn(service.follow_scored(), "follow scored samples")
    ctx.spawn(service.report_for_ever(), "report")
    folder = await asyncio.to_thread(model_folder, config.models.policy, ctx.folder)
    router = trainer_router(service, ranks.phases, gps, ctx.folder, folder)
    async with ctx.serve_http([router], ready=lambda: None):
        ctx.ready()
        await ctx.stopped()
