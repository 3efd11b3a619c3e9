"""What is compared: each mode is a policy of `shared.planning.policies` and settings, on one code path."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from shared.errors import ConfigError
from shared.ids import DeviceId, Role, replica_id
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot
from shared.planning.config import PlannerConfig, PolicyName, RolePlanning
from shared.planning.policies import Split, initial_allocation
from shared.scheduling.streaming import Streaming
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
    """This and the next five are options of the schedulers and the planner (see their configurations)."""
    upstream_weight: float = 0.0
    wait_for_version: bool = False
    counts_prefill: bool = False
    """The planner knows what prefilling moved sequences costs."""
    min_gain_share: float = 0.0
    rebalance: bool = False
    """Sequences also move to replicas that have run empty between shifts."""
    is_fixed: bool = False
    """Devices never move: nothing to decide."""

    @property
    def has_dedicated_training(self) -> bool:
        """Nobody else is ever on training's devices."""
        return self.policy in ("disaggregated", "rollout_reward_colocated")


MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("colocated", "colocated", is_synchronous=True),
        Mode("disaggregated", "disaggregated", is_fixed=True),
        Mode("disaggregated_best", "disaggregated", is_fixed=True, min_gain_share=0.25, rebalance=True),
        Mode("rollout_reward_colocated", "rollout_reward_colocated"),
        Mode("pivot", "pivot"),
        Mode(
            "pivot_best",
            "pivot",
            length_aware=True,
            upstream_weight=0.5,
            wait_for_version=True,
            counts_prefill=True,
            min_gain_share=0.25,
            rebalance=True,
        ),
        Mode("pivot_rebalance", "pivot", rebalance=True),
        Mode("pivot_length_aware", "pivot", length_aware=True),
        Mode("pivot_upstream", "pivot", length_aware=True, upstream_weight=0.5),
        Mode("pivot_prefill", "pivot", counts_prefill=True),
        Mode("pivot_wait", "pivot", wait_for_version=True),
        Mode("pivot_admission", "pivot", min_gain_share=0.25),
        Mode("static", "static"),
        Mode("rule_based", "rule_based"),
        Mode("vanilla", "pivot", use_throughput_model=False, migration=False),
        Mode("vanilla_model", "pivot", migration=False),
    )
}
SPLIT_POLICIES: tuple[PolicyName, ...] = ("disaggregated", "static", "rule_based")
"""Of modes whose devices are split at the start."""


def get_mode(name: str) -> Mode:
    """ConfigError for a name that is none."""
    if name not in MODES:
        raise ConfigError("mode", name, "is unknown", f"One of {', '.join(MODES)}, or all")
    return MODES[name]


def paper_shares(scenario: Scenario, mode: Mode) -> Shares:
    """Devices of each role as in Table 4; zero where a role has none of its own."""
    if mode.policy in SPLIT_POLICIES:
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
    split = Split(shares.rollout, shares.reward) if mode.policy in SPLIT_POLICIES else None
    return cluster, initial_allocation(mode.policy, cluster, split)


@dataclass(frozen=True, slots=True)
class RoleCosts:
    """What a role's replicas cost to shift, and their planning model."""

    shift_up_s: float
    shift_down_s: float
    kv_capacity_tokens: int
    prefill_s_per_token: float
    model: ThroughputModel


def planner_config(
    scenario: Scenario,
    mode: Mode,
    costs: Mapping[Role, RoleCosts],
    training: int,
    streaming: Streaming | None,
    base: PlannerConfig,
) -> PlannerConfig:
    """`base` (window and other settings) with this scenario's models and shift times."""

    def role(of: Role) -> RolePlanning:
        cost = costs[of]
        return RolePlanning(
            cost.model,
            cost.kv_capacity_tokens,
            prefill_s_per_token=cost.prefill_s_per_token if mode.counts_prefill else 0.0,
            min_gain_share=mode.min_gain_share,
            growth_tokens=scenario.growth_margin_tokens,
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
        upstream_weight=max(mode.upstream_weight, base.upstream_weight),
        wait_for_version=mode.wait_for_version or base.wait_for_version,
        training_rest_per_replica=streaming.rest_per_replica if streaming else inf,
    )


def training_shift_s(model: LanguageModel, device: Device, num_devices: int) -> tuple[float, float]:
    """Seconds of a shift up (reload, Read) and down (offload) of training on `num_devices`."""
    offload_s = model.training_offload_s(device, num_devices)
    read_s = model.weight_bytes / num_devices / device.read_bytes_per_s
    return device.wake_s + offload_s + read_s, device.sleep_s + offload_s
