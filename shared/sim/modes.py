"""What is compared: each mode is a policy of `shared.planning.policies` and settings, on one code path."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shared.errors import ConfigError
from shared.ids import DeviceId, Role, replica_id
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot
from shared.planning.config import PlannerConfig, PolicyName, RolePlanning
from shared.planning.policies import Split, initial_allocation
from shared.scheduling.throughput import ThroughputModel
from shared.sim.models import Device, LanguageModel
from shared.sim.scenarios import Scenario, Shares


@dataclass(frozen=True, slots=True)
class Mode:
    """A deployment, strategy or ablation."""

    name: str
    policy: PolicyName
    is_synchronous: bool = False
    """Staleness 0."""
    use_throughput_model: bool = True
    migration: bool = True
    length_aware: bool = False
    rebalance: bool = False
    """Sequences also move to replicas that have run empty between shifts."""
    growth_margin_tokens: int | None = None
    """KV room set aside per sequence, in place of the scenario's. A large one keeps fewer on a replica, in
    issue order, so that older batches finish first and batches do not all end at once."""
    is_fixed: bool = False
    """Devices never move: nothing to decide."""


MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("colocated", "colocated", is_synchronous=True),
        Mode("disaggregated", "disaggregated", is_fixed=True),
        Mode("rollout_reward_colocated", "rollout_reward_colocated"),
        Mode("pivot", "pivot"),
        Mode("pivot_best", "pivot", length_aware=True, rebalance=True, growth_margin_tokens=14_000),
        Mode("pivot_rebalance", "pivot", rebalance=True),
        Mode("pivot_length_aware", "pivot", length_aware=True),
        Mode("pivot_ordered", "pivot", growth_margin_tokens=14_000),
        Mode("static", "static"),
        Mode("rule_based", "rule_based"),
        Mode("vanilla", "pivot", use_throughput_model=False, migration=False),
        Mode("vanilla_model", "pivot", migration=False),
    )
}
SPLIT_MODES = ("disaggregated", "static", "rule_based")
"""Modes whose devices are split at the start."""


def get_mode(name: str) -> Mode:
    """ConfigError for a name that is none."""
    if name not in MODES:
        raise ConfigError("mode", name, "is unknown", f"One of {', '.join(MODES)}, or all")
    return MODES[name]


def paper_shares(scenario: Scenario, mode: Mode) -> Shares:
    """Devices of each role as in Table 4; zero where a role has none of its own."""
    if mode.name in SPLIT_MODES:
        return scenario.paper_split
    if mode.policy == "colocated":
        return Shares(0, 0, scenario.num_devices)
    if mode.policy == "rollout_reward_colocated":
        return Shares(0, 0, scenario.paper_shared_training)
    return Shares(0, 0, scenario.pivot_training)


def cluster_of(scenario: Scenario, training: int) -> ClusterSpec:
    """Slots of both roles over all devices; training on the first `training` devices."""

    def slots(role: Role, width: int) -> list[ReplicaSlot]:
        return [
            ReplicaSlot(
                replica_id(role, i), role, frozenset(DeviceId(d) for d in range(i * width, (i + 1) * width))
            )
            for i in range(scenario.num_devices // width)
        ]

    return ClusterSpec(
        frozenset(DeviceId(d) for d in range(scenario.num_devices)),
        (*slots(Role.ROLLOUT, scenario.policy_tp), *slots(Role.REWARD, scenario.genrm_tp)),
        frozenset(DeviceId(d) for d in range(training)),
    )


def start_of(scenario: Scenario, mode: Mode, shares: Shares) -> tuple[ClusterSpec, Allocation]:
    """The cluster and who holds it at the start. ConfigError for shares that whole replicas cannot fill."""
    cluster = cluster_of(scenario, shares.training)
    split = Split(shares.rollout, shares.reward) if mode.name in SPLIT_MODES else None
    return cluster, initial_allocation(mode.policy, cluster, split)


@dataclass(frozen=True, slots=True)
class RoleCosts:
    """What a role's replicas cost to shift, and their planning model."""

    shift_up_s: float
    shift_down_s: float
    kv_capacity_tokens: int
    model: ThroughputModel


def planner_config(
    scenario: Scenario, mode: Mode, costs: Mapping[Role, RoleCosts], training: int, base: PlannerConfig
) -> PlannerConfig:
    """`base` (window and other settings) with this scenario's models and shift times."""

    def role(of: Role) -> RolePlanning:
        cost = costs[of]
        return RolePlanning(
            cost.model,
            cost.kv_capacity_tokens,
            margin_of(scenario, mode),
            shift_up_s=cost.shift_up_s,
            shift_down_s=cost.shift_down_s,
        )

    up_s, down_s = training_shift_s(scenario.policy, scenario.device, training)
    return replace(
        base,
        policy=mode.policy,
        rollout=role(Role.ROLLOUT),
        reward=role(Role.REWARD),
        training_shift_up_s=up_s,
        training_shift_down_s=down_s,
        use_throughput_model=mode.use_throughput_model,
        migration=mode.migration,
        length_aware=mode.length_aware or base.length_aware,
    )


def margin_of(scenario: Scenario, mode: Mode) -> int:
    """KV tokens that schedulers set aside per sequence."""
    return scenario.growth_margin_tokens if mode.growth_margin_tokens is None else mode.growth_margin_tokens


def training_shift_s(model: LanguageModel, device: Device, num_devices: int) -> tuple[float, float]:
    """Seconds of a shift up (reload, Read) and down (offload) of training on `num_devices`."""
    offload_s = model.training_offload_s(device, num_devices)
    read_s = model.weight_bytes / num_devices / device.read_bytes_per_s
    return device.wake_s + offload_s + read_s, device.sleep_s + offload_s
