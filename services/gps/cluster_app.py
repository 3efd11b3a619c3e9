"""Composition of GPS on one of several nodes (`gps.nodes` in the configuration)."""

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from services.gps.boxes import spec_of
from services.gps.cluster import ClusterService
from services.gps.holder import Holder
from services.gps.layouts import genrm_usage, policy_usage
from services.gps.leader import Leader
from services.gps.loads import newest_model_folder
from services.gps.local_writes import LocalWrites
from services.gps.manifest import Manifest
from services.gps.members import Members
from services.gps.membership import Silence, first_view
from services.gps.node_commands import NodeCommands
from services.gps.packing import group_size_for
from services.gps.peers import Cluster
from services.gps.receivers import Receivers
from services.gps.refill import ModelSource, Refill
from services.gps.regions import Regions
from services.gps.remote_reads import RemoteReads
from services.gps.settings import GpsSettings
from services.gps.store import Store
from services.gps.view_plans import ViewPlans
from shared.bus.process import ServiceContext
from shared.contracts.gps import PolicyVersion, TransportStatus
from shared.contracts.subjects import POLICY_VERSION_KEY
from shared.errors import ConfigError, PivotError
from shared.layout.tensor_layout import TensorSpec
from shared.layout.transfer_plan import Link
from shared.runtime.config import DTYPE, GpsSection
from shared.runtime.models import model_folder
from shared.weights.host_pool import HostPool, remove_leftovers
from shared.weights.peer_links import DRAIN_S, PeerLinks
from shared.weights.ports import Transport
from shared.weights.seed import plan_seed
from shared.weights.transports import TransportKind, open_transport
from shared.weights.ucx import LaneLog, check_lanes, set_environment

NODE_LINK = Link(bandwidth_bytes_per_s=12.5e9, overhead_s=2e-5)
"""Between two nodes; equal for all pairs, so that only the balance depends on it. 100 Gbit/s."""

POLICY, GENRM = "policy", "genrm"


async def open_cluster(
    ctx: ServiceContext, config: GpsSection, *, make: Callable[[str], Transport] | None = None
) -> ClusterService:
    """The service of node `ctx.node`, joined and living; everything is closed by `ctx.exits`. `make` opens
    another transport than NIXL for an agent.

    Raises:
        ConfigError: models are no checkpoints or do not fit; the node has no address.
        TransportError: NIXL or UCX do not start, or not as configured.
    """
    address = address_of(config, ctx.node)
    sources = {name: await asyncio.to_thread(_source, ctx, name) for name in (POLICY, GENRM)}
    specs = {name: {t.name: spec_of(t) for t in s.plan.tensors} for name, s in sources.items()}
    usages = {POLICY: policy_usage(ctx.config), GENRM: genrm_usage(ctx.config)}
    storages = {name: usages[name].storages(list(found.values())) for name, found in specs.items()}
    manifest = Manifest(ctx.folder.path / f"gps-n{ctx.node}.json")
    for path in remove_leftovers(run=ctx.config.run.name, node=ctx.node, keep=manifest.paths()):
        ctx.log.info("removed %s, a leftover of a dead process", path)
    settings = GpsSettings.of_node(kept=manifest.paths())
    budget = config.node_bytes or settings.budget_bytes
    pool = HostPool(run=ctx.config.run.name, node=ctx.node, budget_bytes=budget, folder=settings.folder)
    ctx.exits.callback(pool.close)

    incarnation = secrets.token_hex(4)
    log_file = ctx.folder.logs / f"ucx-n{ctx.node}-{incarnation}.log"
    if make is None:
        set_environment(config.transport, address, log_file)
    agent = f"{ctx.config.run.name}/gps-{ctx.node}/{incarnation}"
    kind: TransportKind = "rdma" if config.transport == "rdma" else "nixl"
    links = PeerLinks(lambda: make(agent) if make else open_transport(kind, agent), f"gps-{ctx.node}")
    await links.start()
    ctx.exits.push_async_callback(_close, links, ctx)
    ctx.log.info("%s; gps.transport is %s", await links.explain(), config.transport)

    size = _group_size(sources, specs, len(config.nodes), budget)
    view = first_view(range(len(config.nodes)), size)
    cluster = Cluster(ctx.node, incarnation, config, ctx.bus, ctx.subjects, links, specs, storages, view)
    transport = _Transport(config, log_file, ctx)
    store = Store(pool, new_id=lambda: secrets.token_hex(8), max_lease_s=settings.max_lease_s)
    service = _assemble(ctx, cluster, store, manifest, sources, transport, size)
    ctx.exits.callback(service.holder.close)
    await ctx.bus.ensure_bucket(ctx.subjects.gps_bucket)
    await ctx.bus.ensure_bucket(ctx.subjects.policy_bucket)
    await ctx.bus.subscribe(ctx.subjects.gps_heartbeat, service.members.hear)
    await NodeCommands(service).serve()
    ctx.spawn(service.members.heartbeat(), "heartbeat")
    await service.members.enter()
    ctx.spawn(service.members.live(), "members")
    ctx.exits.push_async_callback(service.members.leave)
    return service


def address_of(config: GpsSection, node: int) -> str:
    """Where node `node` listens. Raises ConfigError if the configuration gives it no address."""
    if node >= len(config.nodes):
        raise ConfigError(
            "gps.nodes",
            list(config.nodes),
            f"has no address for node {node}",
            "Add it to the end, and write run.json anew with `pivotrl init`",
        )
    return config.nodes[node]


def _source(ctx: ServiceContext, name: str) -> ModelSource:
    folder = model_folder(getattr(ctx.config.models, name), ctx.folder)
    return ModelSource(name, plan_seed(folder, DTYPE), folder, is_frozen=name == GENRM)


def _group_size(
    sources: dict[str, ModelSource],
    specs: dict[str, dict[str, TensorSpec]],
    num_nodes: int,
    budget: int,
) -> int:
    models = [(specs[name], 1 if source.is_frozen else 2) for name, source in sources.items()]
    try:
        return group_size_for(models, num_nodes, budget)
    except ValueError as error:
        remedy = "Add nodes, or give each more memory"
        raise ConfigError("gps.node_bytes", budget, str(error), remedy) from error


class _Transport:
    """What UCX chose; a change is logged, a choice that is not allowed is an error of every copy."""

    def __init__(self, config: GpsSection, log_file: Path, ctx: ServiceContext) -> None:
        self._config, self._log, self._ctx = config, LaneLog(log_file), ctx
        self._seen: tuple[str, ...] = ()

    def status(self) -> TransportStatus:
        lanes = self._log.lanes()
        shown = tuple(f"{lane.transport} on {lane.device}" for lane in lanes)
        if shown != self._seen:
            self._seen = shown
            self._ctx.log.info("UCX carries parameters by %s", ", ".join(shown))
        tls = os.environ.get("UCX_TLS", "unset: UCX chooses")
        return TransportStatus(wanted=self._config.transport, lanes=shown, explain=f"UCX_TLS {tls}")

    def check(self) -> None:
        """Raises TransportError."""
        self.status()
        check_lanes(self._config.transport, self._log.lanes())


def _assemble(
    ctx: ServiceContext,
    cluster: Cluster,
    store: Store,
    manifest: Manifest,
    sources: dict[str, ModelSource],
    transport: _Transport,
    group_size: int,
) -> ClusterService:
    config, now_s = cluster.config, ctx.clock.now_s
    late: list[ClusterService] = []  # the parts tell the whole, which is made of them

    async def publish(version: PolicyVersion) -> None:
        await ctx.bus.kv_put(ctx.subjects.policy_bucket, POLICY_VERSION_KEY, version)

    regions = Regions(cluster.links, now_s, max(2 * config.copy_deadline_s, 2 * DRAIN_S))
    holder = Holder(
        cluster, store, ctx.config.run.name, now_s, lambda: late[0].changed(), regions, transport.check
    )
    plans = ViewPlans(cluster, NODE_LINK)
    reads = RemoteReads(holder, plans)
    members = Members(
        cluster,
        Silence(cluster.node, config.dead_after_s),
        ctx.clock,
        group_size,
        view_changed=lambda old, new: late[0].view_changed(old, new),
        commit_seen=lambda commit: late[0].commit_seen(commit),
        beaten=lambda: late[0].publish_policy(),
    )
    refill = Refill(
        holder,
        reads,
        manifest,
        sources,
        members.propose,
        lambda model: newest_model_folder(ctx.folder, sources[model].folder, DTYPE),
        lambda folder: plan_seed(folder, DTYPE),
    )
    members.refill = refill
    leads = Leader(
        cluster,
        store.new_id,
        members.refresh,
        members.read_commit,
        members.swap_commit,
        members.see,
    )
    service = ClusterService(
        holder,
        plans,
        Receivers(holder, reads, members.refresh),
        members,
        refill,
        leads,
        LocalWrites(holder, members.refresh),
        publish,
        transport.status,
    )
    late.append(service)
    return service


async def _close(links: PeerLinks, ctx: ServiceContext) -> None:
    try:
        await links.close()
    except PivotError as error:
        ctx.log.warning("the transport does not close: %s", error)
