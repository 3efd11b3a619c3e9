"""The deployments PivotRL is compared with, on the planner's own interface (paper §8.1, §8.4, Appendix E).

    disaggregated              devices are fixed
    colocated                  all devices serve one role at a time: rollout, reward, training
    rollout_reward_colocated   rollout and reward take turns; training has its own devices
    static                     training's devices are lent, half and half, while no batch is ready
    rule_based                 a role full of sequences shifts up, one nearly empty gives

Each decides from the same observation as the planner and is executed by the same path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from shared.errors import ConfigError
from shared.ids import DeviceId, ReplicaId, Role
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot
from shared.planning.config import PlannerConfig, PolicyName
from shared.planning.pairs import shift_pairs
from shared.planning.plan import PlanRecord
from shared.planning.planner import Planner
from shared.planning.policy import Policy, ShiftPolicy
from shared.planning.workload import WorkloadState


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of each generating role where they are fixed at the start."""

    rollout_devices: int
    reward_devices: int


def make_policy(config: PlannerConfig, cluster: ClusterSpec, allocation: Allocation) -> Policy:
    """The policy that `config.policy` names."""
    match config.policy:
        case "pivot":
            return Planner(config, cluster, allocation)
        case "disaggregated":
            return Disaggregated(config, cluster, allocation)
        case "colocated":
            return Colocated(config, cluster, allocation)
        case "rollout_reward_colocated":
            return RolloutRewardColocated(config, cluster, allocation)
        case "static":
            return Static(config, cluster, allocation)
        case "rule_based":
            return RuleBased(config, cluster, allocation)
        case _:
            assert_never(config.policy)


def initial_allocation(policy: PolicyName, cluster: ClusterSpec, split: Split | None = None) -> Allocation:
    """Where a run starts. `split` is needed where roles have fixed devices, and ignored elsewhere.

    `pivot` and `colocated` start with every device in rollout; the others leave training its devices.
    """
    if policy in ("pivot", "colocated"):
        return Allocation(frozenset(slot.id for slot in cluster.slots_of(Role.ROLLOUT)))
    taken = set(cluster.training_devices)
    if policy == "rollout_reward_colocated":
        return Allocation(
            frozenset(_disjoint(cluster.slots_of(Role.ROLLOUT), taken, len(cluster.devices))), True
        )
    if split is None:
        raise ConfigError("split", None, f"{policy} needs one", "Say how many devices rollout and reward get")
    # Reward first: its slots are the wider ones, and rollout fits around them.
    active: list[ReplicaId] = []
    for role, num_devices in ((Role.REWARD, split.reward_devices), (Role.ROLLOUT, split.rollout_devices)):
        chosen = _disjoint(cluster.slots_of(role), taken, num_devices)
        found = sum(len(cluster.slot(replica).devices) for replica in chosen)
        if found == 0 or found < num_devices:
            raise ConfigError(
                f"split.{role}_devices",
                num_devices,
                f"only {found} devices are free for whole replicas of {role}",
                "Lower it, or give training fewer devices",
            )
        active += chosen
    return Allocation(frozenset(active), True)


def _disjoint(slots: Sequence[ReplicaSlot], taken: set[DeviceId], num_devices: int) -> list[ReplicaId]:
    """Slots in the given order, off the `taken` devices, up to `num_devices`; they are added to `taken`."""
    chosen: list[ReplicaId] = []
    left = num_devices
    for slot in slots:
        if len(slot.devices) <= left and taken.isdisjoint(slot.devices):
            chosen.append(slot.id)
            taken |= slot.devices
            left -= len(slot.devices)
    return chosen


class Disaggregated(ShiftPolicy):
    """Never shifts."""

    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        return PlanRecord(now_s, "devices are fixed")


class Colocated(ShiftPolicy):
    """Rollout until nothing is left to generate, reward until all is scored, training, and again."""

    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        training = state.training
        if self._allocation.training_holds:
            if training.is_active or training.batch_ready:
                return PlanRecord(now_s, "training has the devices")
            return self._all_to(Role.ROLLOUT, "training is done", now_s)
        if self._allocation.active_of(Role.REWARD, self.cluster):
            if state.reward.num_sequences:
                return PlanRecord(now_s, "reward has the devices")
            if training.batch_ready:
                return self._all_to(Role.TRAINING, "the batch is scored", now_s)
            if state.rollout.num_sequences:
                return self._all_to(
                    Role.ROLLOUT, "reward has nothing left and the batch is not complete", now_s
                )
            return PlanRecord(now_s, "waiting for a batch")
        if not self._allocation.active:
            return self._all_to(Role.ROLLOUT, "no role has the devices", now_s)
        if state.rollout.num_sequences:
            return PlanRecord(now_s, "rollout has the devices")
        if state.reward.num_sequences:
            return self._all_to(Role.REWARD, "the batch is generated", now_s)
        if training.batch_ready:
            return self._all_to(Role.TRAINING, "the batch is scored", now_s)
        return PlanRecord(now_s, "waiting for sequences")

    def _all_to(self, role: Role, why: str, now_s: float) -> PlanRecord:
        slots = [] if role is Role.TRAINING else self.cluster.slots_of(role)
        up = [slot.id for slot in slots if slot.id not in self._allocation.active]
        return PlanRecord(now_s, f"{why}: all devices to {role}", role, self.plan_for(role, up))


class RolloutRewardColocated(ShiftPolicy):
    """Rollout and reward take turns on every device that is not training's."""

    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        if not self._allocation.active:  # a shift failed
            role = Role.REWARD if state.reward.num_sequences else Role.ROLLOUT
            return self._turn_of(role, "no role has the devices", now_s)
        holder = Role.REWARD if self._allocation.active_of(Role.REWARD, self.cluster) else Role.ROLLOUT
        if state.of(holder).num_sequences or not state.of(holder.opposite).num_sequences:
            return PlanRecord(now_s, f"{holder} has its turn")
        return self._turn_of(holder.opposite, f"{holder} has nothing left", now_s)

    def _turn_of(self, role: Role, why: str, now_s: float) -> PlanRecord:
        taken = set(self.cluster.training_devices)
        up = _disjoint(self.cluster.slots_of(role), taken, len(self.cluster.devices))
        return PlanRecord(now_s, f"{why}: {role} has its turn", role, self.plan_for(role, up))


class Static(ShiftPolicy):
    """Only training's devices move: lent half to reward and half to rollout while no batch is ready.

    Rollout takes its half first; reward gets the devices left free at the next decision.
    """

    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        training = state.training
        if training.batch_ready and not training.is_active and not self._allocation.training_holds:
            plan = self.plan_for(Role.TRAINING)
            return PlanRecord(
                now_s, "the next batch is ready: training takes its devices back", Role.TRAINING, plan
            )
        if training.is_active or training.batch_ready:
            return PlanRecord(now_s, "training needs its devices")
        for role, lent in self._loans().items():
            if missing := [replica for replica in lent if replica not in self._allocation.active]:
                return PlanRecord(
                    now_s, f"no batch is ready: {role} borrows", role, self.plan_for(role, missing)
                )
        return PlanRecord(now_s, "training's devices are lent")

    def _loans(self) -> dict[Role, list[ReplicaId]]:
        own = self.cluster.training_devices
        half = (len(own) + 1) // 2
        taken = set(self.cluster.devices - own)
        reward = _disjoint(self.cluster.slots_of(Role.REWARD)[::-1], taken, half)
        rollout = _disjoint(self.cluster.slots_of(Role.ROLLOUT), taken, len(own))
        return {Role.ROLLOUT: rollout, Role.REWARD: reward}


class RuleBased(ShiftPolicy):
    """A role over `kv_use_high` takes a replica from free devices, idle training or a nearly empty role."""

    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        training = state.training
        if training.batch_ready and not training.is_active and not self._allocation.training_holds:
            plan = self.plan_for(Role.TRAINING)
            return PlanRecord(
                now_s, "the next batch is ready: training takes its devices", Role.TRAINING, plan
            )
        use = {role: self._kv_use(state, role) for role in (Role.ROLLOUT, Role.REWARD)}
        role = max((Role.ROLLOUT, Role.REWARD), key=lambda r: use[r])
        if use[role] <= self.config.kv_use_high:
            return PlanRecord(now_s, f"no role uses over {self.config.kv_use_high:.0%} of its KV cache")
        pairs = shift_pairs(
            self.cluster,
            self._allocation,
            role,
            lambda replica: 1.0,
            training_active=training.is_active or training.batch_ready,
        )
        for pair in pairs:
            if not pair.down_replicas or use[role.opposite] < self.config.kv_use_low:
                plan = self.make_plan(
                    role, pair.up_replicas[:1], pair.down_replicas, pair.training_down, pair.penalty_tokens
                )
                return PlanRecord(now_s, f"{role} uses {use[role]:.0%} of its KV cache", role, plan)
        return PlanRecord(now_s, f"{role} is full but nobody can give", role)

    def _kv_use(self, state: WorkloadState, role: Role) -> float:
        """Share of the role's KV capacity in use; 1 when it has work and no replica."""
        load = state.of(role)
        active = self._allocation.active_of(role, self.cluster)
        if not active:
            return 1.0 if load.num_sequences else 0.0
        known = {r.replica: r.kv_capacity_tokens for r in load.replicas}
        capacity = sum(known.get(r, self.config.of(role).kv_capacity_tokens) for r in active)
        return load.num_tokens / capacity
