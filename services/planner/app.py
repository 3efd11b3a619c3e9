"""Composition root of the planner: the policy the run names, the executor, REST."""

import asyncio
import logging
from math import inf

from services.planner.api import planner_router
from services.planner.executor import ShiftExecutor
from services.planner.leases import DeviceLeases
from services.planner.service import PlannerService
from shared.bus.process import ServiceContext
from shared.contracts.base import Message
from shared.contracts.monitor import WorkloadPublished
from shared.errors import DeadlineExceeded
from shared.ids import ReplicaId, Role
from shared.planning.cluster import Allocation
from shared.planning.config import PlannerConfig, RolePlanning
from shared.planning.policies import Split, initial_allocation, make_policy
from shared.runtime.config import RunConfig
from shared.runtime.profiles import throughput_of
from shared.runtime.run_folder import RunFolder
from shared.runtime.topology import cluster_of
from shared.scheduling.migration import warm_up
from shared.scheduling.streaming import STREAMING

log = logging.getLogger("pivotrl.planner")
START_DEADLINE_S = 600.0


async def main(ctx: ServiceContext) -> None:
    config = ctx.config
    cluster = cluster_of(config)
    planner_config = planner_config_of(config, ctx.folder)
    leases = DeviceLeases(ctx.bus, ctx.subjects)
    executor = ShiftExecutor(cluster, leases, ctx.bus, ctx.subjects, ctx.clock)
    split = Split(config.cluster.split.rollout, config.cluster.split.reward)
    initial = initial_allocation(config.policy, cluster, split)

    first = await _first_workload(ctx)
    service = PlannerService(
        make_policy(planner_config, cluster, initial),
        planner_config,
        cluster,
        executor,
        leases,
        ctx.bus,
        ctx.subjects,
        ctx.clock,
        ctx.folder.journal / "decisions.jsonl",
    )
    ctx.metrics.add_source(lambda: service.policy.gauges())
    state = {"ready": False}
    async with ctx.serve_http(
        [planner_router(service)], ready=lambda: None if state["ready"] else "the replicas"
    ):
        ctx.ready()
        started = asyncio.create_task(_start(ctx, service, first, initial, planner_config))
        started.add_done_callback(
            lambda task: state.update(ready=not task.cancelled() and task.exception() is None)
        )
        ctx.spawn(_joined(started), "start")
        await ctx.stopped()


async def _joined(task: "asyncio.Task[None]") -> None:
    await task


async def _start(
    ctx: ServiceContext,
    service: PlannerService,
    first: "asyncio.Future[WorkloadPublished]",
    initial: Allocation,
    planner_config: PlannerConfig,
) -> None:
    """Waits until every replica and rank is there, brings the first allocation up, then decides on each
    workload. No decision waits for the compiler: its part is done before."""
    await asyncio.to_thread(warm_up)
    try:
        workload = await asyncio.wait_for(first, START_DEADLINE_S)
    except TimeoutError:
        raise DeadlineExceeded(
            role="planner", peer="monitor", phase="first workload", deadline_s=START_DEADLINE_S
        ) from None
    active = {ReplicaId(r.replica_id) for role in (workload.rollout, workload.reward) for r in role.replicas}
    actual = Allocation(frozenset(active), workload.training_holds_devices)
    allocation = await service.start(actual, initial)
    service.policy = make_policy(planner_config, service.cluster, allocation)
    await ctx.bus.subscribe(ctx.subjects.workload, service.on_workload)


async def _first_workload(ctx: ServiceContext) -> "asyncio.Future[WorkloadPublished]":
    first: asyncio.Future[WorkloadPublished] = asyncio.get_running_loop().create_future()

    async def on_workload(message: Message) -> None:
        assert isinstance(message, WorkloadPublished)
        if message.ready and not first.done():
            first.set_result(message)

    await ctx.bus.subscribe(ctx.subjects.workload, on_workload)
    return first


def planner_config_of(config: RunConfig, folder: RunFolder) -> PlannerConfig:
    def role(which: Role, min_replicas: int, growth_tokens: int) -> RolePlanning:
        speed = throughput_of(config, which, folder)
        log.info("%s: throughput constants %s", which, speed.source)
        return RolePlanning(
            throughput_model=speed.model,
            prefill_s_per_token=speed.prefill_s_per_token,
            min_gain_share=speed.min_gain_share,
            kv_capacity_tokens=config.cluster.kv_tokens,
            growth_tokens=min(512, growth_tokens),
            min_replicas=min_replicas,
            shift_up_s=1.0,
            shift_down_s=1.0,
        )

    streaming = STREAMING[config.training.streaming]
    return PlannerConfig(
        policy=config.policy,
        rollout=role(Role.ROLLOUT, config.planner.min_rollout, config.rollout.max_new_tokens),
        reward=role(Role.REWARD, config.planner.min_reward, config.reward.max_new_tokens),
        window_s=config.planner.window_s,
        length_aware=True,  # these two: ADR 9
        upstream_weight=0.5,
        training_rest_per_replica=streaming.rest_per_replica if streaming else inf,
    )
