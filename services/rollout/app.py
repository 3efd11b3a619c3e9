"""Composition root of the rollout service."""

import asyncio

from fastapi import APIRouter

from services.rollout.dataset import open_source
from services.rollout.service import RolloutService
from shared.bus.process import ServiceContext
from shared.contracts.gps import PolicyVersion
from shared.contracts.subjects import POLICY_VERSION_KEY
from shared.ids import Role
from shared.inference.role import RoleShell
from shared.inference.role_api import role_router
from shared.runtime.checkpoints import Checkpoints
from shared.runtime.journal import Journal, read_journal
from shared.runtime.models import model_folder
from shared.runtime.profiles import throughput_of
from shared.runtime.tokenizer import ChatTokenizer
from shared.runtime.topology import cluster_of
from shared.scheduling.migration import warm_up
from shared.scheduling.scheduler import Scheduler, SchedulerConfig


async def main(ctx: ServiceContext) -> None:
    config = ctx.config
    await asyncio.to_thread(warm_up)
    tokenizer = await asyncio.to_thread(ChatTokenizer, model_folder(config.models.policy, ctx.folder))
    source = await asyncio.to_thread(open_source, config.data, config.run.seed)
    path = ctx.folder.journal / "rollout.jsonl"
    issued = [entry["sample"] for entry in read_journal(path) if entry["event"] == "issued"]
    service = RolloutService(config, source, tokenizer, ctx.bus, ctx.subjects, Journal(path))
    speed = throughput_of(config, Role.ROLLOUT, ctx.folder)
    shell = RoleShell(
        Role.ROLLOUT,
        cluster_of(config).slots_of(Role.ROLLOUT),
        Scheduler(SchedulerConfig(throughput_model=speed.model, min_gain_share=speed.min_gain_share)),
        ctx.bus,
        ctx.subjects,
        ctx.clock,
        on_finished=service.on_finished,
        on_failed=service.on_failed,
    )
    service.shell, shell.describe = shell, service.describe
    ctx.metrics.add_source(shell.scheduler.gauges)
    await shell.start()
    # A restarted run goes on from its checkpoint; GPS has that version once the trainer has written it.
    await service.recover(issued, Checkpoints(ctx.folder.checkpoints).latest().step)
    for name, task in shell.tasks():
        ctx.spawn(task(), name)
    ctx.spawn(service.issue_for_ever(), "issue")
    await ctx.bus.kv_watch(ctx.subjects.policy_bucket, POLICY_VERSION_KEY, PolicyVersion, service.on_version)
    router = APIRouter()
    router.include_router(role_router(shell))
    async with ctx.serve_http([router], ready=shell.ready):
        ctx.ready()
        await ctx.stopped()
