"""Random states of a run, as a planner may meet them: clusters, allocations, loads with long tails."""

import random
from typing import NamedTuple

from shared.ids import DeviceId, ReplicaId, Role, replica_id
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot
from shared.planning.config import PlannerConfig, RolePlanning
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.scheduling.sequence import ReplicaLoad, RoleLoad
from shared.scheduling.throughput import H20_7B_TP1, H200_7B_TP1, H200_30B_A3B_TP1, ThroughputModel

DENSE = (H20_7B_TP1, H200_7B_TP1)
MOE = (H200_30B_A3B_TP1,)
LONGEST = 16_000


class Situation(NamedTuple):
    """All that a decision depends on."""

    config: PlannerConfig
    cluster: ClusterSpec
    allocation: Allocation
    state: WorkloadState


def slots(role: Role, num_devices: int, width: int) -> list[ReplicaSlot]:
    """Slots of `width` devices, side by side from device 0."""
    return [
        ReplicaSlot(
            replica_id(role, first // width), role, frozenset(map(DeviceId, range(first, first + width)))
        )
        for first in range(0, num_devices - width + 1, width)
    ]


def lengths(rng: random.Random, num: int, median: float, sigma: float) -> tuple[int, ...]:
    """Ascending, lognormal, cut at the longest context."""
    return tuple(
        sorted(min(LONGEST, 1 + int(median * rng.lognormvariate(0.0, sigma))) for _ in range(max(0, num)))
    )


def mid_run(
    num_devices: int, rng: random.Random, *, reward_tp: int = 4, pressed: Role = Role.REWARD
) -> Situation:
    """The states that timings are made with: a third of the devices serve reward, the rest rollout on one
    device each. Rollout replicas hold about 24 sequences, reward's 90, and reward has a queue; or, with
    rollout `pressed`, 60 and 10, and rollout has it."""
    config = PlannerConfig(
        rollout=RolePlanning(H20_7B_TP1, 400_000), reward=RolePlanning(H200_30B_A3B_TP1, 400_000 * reward_tp)
    )
    mean_rollout, mean_reward = (24, 90) if pressed is Role.REWARD else (60, 10)
    rollout, reward = slots(Role.ROLLOUT, num_devices, 1), slots(Role.REWARD, num_devices, reward_tp)
    devices = frozenset(map(DeviceId, range(num_devices)))
    training = frozenset(map(DeviceId, range(num_devices // 2)))
    cluster = ClusterSpec(devices, (*rollout, *reward), training)
    active_reward = reward[: max(1, num_devices // (3 * reward_tp))]
    active_rollout = rollout[len(active_reward) * reward_tp :]

    def load(slot: ReplicaSlot) -> ReplicaLoad:
        mean = mean_rollout if slot.role is Role.ROLLOUT else mean_reward
        each = lengths(rng, max(1, int(rng.gauss(mean, mean / 4))), 1_340.0, 0.8)
        return ReplicaLoad(slot.id, len(each), sum(each), config.of(slot.role).kv_capacity_tokens, each)

    loads = {
        Role.ROLLOUT: RoleLoad(tuple(load(slot) for slot in active_rollout)),
        Role.REWARD: RoleLoad(tuple(load(slot) for slot in active_reward)),
    }
    queue = tuple(int(rng.lognormvariate(7.5, 0.5)) for _ in range(rng.randrange(num_devices)))
    loads[pressed] = RoleLoad(loads[pressed].replicas, queue)
    state = WorkloadState(loads[Role.ROLLOUT], loads[Role.REWARD], TrainingState())
    active = frozenset(slot.id for slot in (*active_reward, *active_rollout))
    return Situation(config, cluster, Allocation(active), state)


def random_situation(rng: random.Random, models: tuple[tuple[ThroughputModel, ...], ...]) -> Situation:
    """Anything a run may come to: who holds what, how full it is, what training does, what may be set.

    `models` are those of rollout and of reward, to pick from.
    """
    num_devices = rng.choice((4, 8, 12, 16, 24))
    width = {Role.ROLLOUT: rng.choice((1, 1, 2, 4)), Role.REWARD: rng.choice((1, 2, 4, 4))}
    of_role = {role: slots(role, num_devices, width[role]) for role in width}
    num_training = num_devices // rng.choice((1, 2, 4))
    training = frozenset(map(DeviceId, range(num_training)))
    cluster = ClusterSpec(
        frozenset(map(DeviceId, range(num_devices))),
        tuple(s for each in of_role.values() for s in each),
        training,
    )
    activity = rng.choice(list(TrainingActivity))
    holds = activity is TrainingActivity.ACTIVE or (activity is TrainingActivity.DONE and rng.random() < 0.6)
    taken = set(training) if holds else set()
    active: list[ReplicaSlot] = []
    share = rng.random()
    first = [slot for each in of_role.values() for slot in each]
    rng.shuffle(first)
    first.sort(key=lambda slot: rng.random() + (slot.role is Role.REWARD) * (0.5 - share))
    for slot in first:
        if taken.isdisjoint(slot.devices) and rng.random() < 0.93:
            active.append(slot)
            taken |= slot.devices
    tightness = rng.choice((8, 8, 8, 1))
    fullness = {role: rng.choice((0.02, 0.3, 1.0, 2.0)) for role in width}
    roles = {}
    for role in width:
        per_replica = fullness[role] * rng.choice((30, 100))
        capacity = int(tightness * max(4_000, 2_400 * per_replica))
        median, sigma = rng.choice((300.0, 1_300.0, 4_000.0)), rng.choice((0.3, 0.8, 1.2))
        loads = []
        for slot in sorted((s for s in active if s.role is role), key=lambda s: min(s.devices)):
            num = 0 if rng.random() < 0.1 else int(rng.gauss(per_replica, per_replica / 3))
            held: list[int] = []
            for length in lengths(rng, num, median, sigma):
                if sum(held) + length + 512 * (len(held) + 1) <= capacity:
                    held.append(length)
            loads.append(ReplicaLoad(slot.id, len(held), sum(held), capacity, tuple(held)))
        num_waiting = rng.choice((0, 0, rng.randrange(8), rng.randrange(200)))
        waiting = list(lengths(rng, num_waiting, median, sigma))
        rng.shuffle(waiting)
        roles[role] = (RoleLoad(tuple(loads), tuple(waiting)), capacity)
    settings = {
        role: RolePlanning(
            rng.choice(models[role is Role.REWARD]),
            roles[role][1],
            min_replicas=rng.choice((0, 0, 1)),
            shift_up_s=rng.choice((0.5, 3.0)),
        )
        for role in width
    }
    config = PlannerConfig(
        rollout=settings[Role.ROLLOUT], reward=settings[Role.REWARD], window_s=rng.choice((5.0, 60.0, 600.0))
    )
    state = WorkloadState(
        roles[Role.ROLLOUT][0],
        roles[Role.REWARD][0],
        TrainingState(activity, (not holds and rng.random() < 0.05) or (holds and rng.random() < 0.3)),
    )
    replicas: frozenset[ReplicaId] = frozenset(slot.id for slot in active)
    return Situation(config, cluster, Allocation(replicas, holds), state)
