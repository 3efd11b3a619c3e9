"""Composition root of the reward service."""

import asyncio
from pathlib import Path

from services.reward.api import reward_router
from services.reward.service import RewardService
from shared.bus.process import ServiceContext
from shared.errors import ConfigError
from shared.ids import Role
from shared.inference.role import RoleShell
from shared.inference.role_api import role_router
from shared.runtime.journal import Journal
from shared.runtime.models import model_folder
from shared.runtime.profiles import throughput_of
from shared.runtime.tokenizer import ChatTokenizer
from shared.runtime.topology import cluster_of
from shared.scheduling.migration import warm_up
from shared.scheduling.scheduler import Scheduler, SchedulerConfig


async def main(ctx: ServiceContext) -> None:
    config = ctx.config
    await asyncio.to_thread(warm_up)
    tokenizer = await asyncio.to_thread(ChatTokenizer, model_folder(config.models.genrm, ctx.folder))
    service = RewardService(
        config,
        tokenizer,
        load_template(config.reward.template),
        ctx.bus,
        ctx.subjects,
        ctx.clock,
        Journal(ctx.folder.journal / "reward.jsonl"),
    )
    speed = throughput_of(config, Role.REWARD, ctx.folder)
    shell = RoleShell(
        Role.REWARD,
        cluster_of(config).slots_of(Role.REWARD),
        Scheduler(SchedulerConfig(throughput_model=speed.model, min_gain_share=speed.min_gain_share)),
        ctx.bus,
        ctx.subjects,
        ctx.clock,
        on_finished=service.on_finished,
        on_failed=service.on_failed,
    )
    ctx.exits.push_async_callback(service.close)
    service.shell, shell.describe = shell, service.describe
    ctx.metrics.add_source(lambda: {**shell.scheduler.gauges(), **service.gauges()})
    await shell.start()
    await shell.recover([])
    for name, task in shell.tasks():
        ctx.spawn(task(), name)
    ctx.spawn(service.follow_trajectories(), "trajectories")
    ctx.spawn(service.watch_deadlines(), "deadlines")
    async with ctx.serve_http([role_router(shell), reward_router(service)], ready=shell.ready):
        ctx.ready()
        await ctx.stopped()


def load_template(name: str) -> str:
    """A built-in template's name as it is, or the text of a file.

    Raises:
        ConfigError: neither; or the text lacks {question} or {response}.
    """
    if name == "pointwise":
        return name
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            "reward.template", name, "is no built-in template and no file", "Use pointwise, or a text file"
        )
    text = path.read_text()
    for part in ("{question}", "{response}"):
        if part not in text:
            raise ConfigError("reward.template", name, f"the text lacks {part}", "Put it where it belongs")
    return text
