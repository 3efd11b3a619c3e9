"""Composition root of the monitor."""

from services.monitor.api import monitor_router
from services.monitor.report import MetricsFiles
from services.monitor.service import MonitorService
from services.monitor.timeline import Timeline
from services.monitor.workload import WorkloadAggregator
from shared.bus.process import ServiceContext
from shared.runtime.topology import cluster_of


async def main(ctx: ServiceContext) -> None:
    for spec in ctx.subjects.streams:
        await ctx.bus.ensure_stream(spec)
    cluster = cluster_of(ctx.config)
    files = MetricsFiles(ctx.folder.path)
    ctx.exits.callback(files.close)
    service = MonitorService(
        WorkloadAggregator(frozenset(slot.id for slot in cluster.slots)),
        Timeline(cluster),
        files,
        ctx.folder,
        ctx.bus,
        ctx.subjects,
        ctx.clock,
    )
    await service.start()
    ctx.spawn(service.follow_shifts(), "shifts")
    ctx.spawn(service.follow_steps(), "steps")
    ctx.spawn(service.publish_for_ever(), "workload")
    ctx.spawn(service.sample_for_ever(), "throughput")
    async with ctx.serve_http([monitor_router(service, ctx.clock.now_s)], ready=lambda: None):
        ctx.ready()
        await ctx.stopped()
