"""Composition root of GPS."""

import secrets

from services.gps.api import gps_router
from services.gps.cluster_app import address_of, open_cluster
from services.gps.layouts import genrm_usage, policy_usage
from services.gps.manifest import Manifest
from services.gps.plans import Plans
from services.gps.service import GENRM, POLICY, GpsService, Seed
from services.gps.settings import GpsSettings
from services.gps.store import Store
from shared.bus.process import ServiceContext
from shared.contracts.gps import PolicyVersion
from shared.contracts.subjects import POLICY_VERSION_KEY
from shared.runtime.config import DTYPE, GpsSection, RunConfig
from shared.runtime.models import model_folder
from shared.runtime.run_folder import RunFolder
from shared.weights.host_pool import HostPool, remove_leftovers


async def main(ctx: ServiceContext) -> None:
    if ctx.config.gps is not None and len(ctx.config.gps.nodes) > 1:
        await _serve_cluster(ctx, ctx.config.gps)
    else:
        await _serve_node(ctx)


async def _serve_cluster(ctx: ServiceContext, config: GpsSection) -> None:
    service = await open_cluster(ctx, config)
    ctx.metrics.add_source(service.gauges)
    router = gps_router(service, ctx.folder)
    host = address_of(config, ctx.node)
    async with ctx.serve_http([router], ready=service.waits_for, host=host):
        await ctx.until_true(lambda: service.waits_for() is None)
        ctx.ready()
        await ctx.stopped()


async def _serve_node(ctx: ServiceContext) -> None:
    config = ctx.config
    manifest = Manifest(ctx.folder.path / f"gps-n{ctx.node}.json")
    for path in remove_leftovers(run=config.run.name, node=ctx.node, keep=manifest.paths()):
        ctx.log.info("removed %s, a leftover of a dead process", path)
    settings = GpsSettings.of_node(kept=manifest.paths())
    pool = HostPool(
        run=config.run.name, node=ctx.node, budget_bytes=settings.budget_bytes, folder=settings.folder
    )
    ctx.exits.callback(pool.close)

    async def publish(version: PolicyVersion) -> None:
        await ctx.bus.kv_put(ctx.subjects.policy_bucket, POLICY_VERSION_KEY, version)

    service = GpsService(
        Store(pool, new_id=lambda: secrets.token_hex(8), max_lease_s=settings.max_lease_s),
        Plans((f"node-{ctx.node}",), settings.budget_bytes, lambda _sender, _receiver: settings.local),
        publish,
        ctx.clock.now_s,
        manifest,
    )
    ctx.metrics.add_source(service.gauges)
    await ctx.bus.ensure_bucket(ctx.subjects.policy_bucket)
    ctx.spawn(service.publish_for_ever(), "publish")
    async with ctx.serve_http([gps_router(service, ctx.folder)], ready=service.waits_for):
        await service.seed_all(seeds_of(config, ctx.folder))
        ctx.ready()
        await ctx.stopped()


def seeds_of(config: RunConfig, folder: RunFolder) -> list[Seed]:
    """The models of a run, each with who uses it."""
    policy, genrm = (model_folder(spec, folder) for spec in (config.models.policy, config.models.genrm))
    return [
        Seed(POLICY, policy, DTYPE, is_frozen=False, usage=policy_usage(config)),
        Seed(GENRM, genrm, DTYPE, is_frozen=True, usage=genrm_usage(config)),
    ]
