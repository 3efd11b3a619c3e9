"""The cluster a configuration describes: which replica slot and which rank lives on which device."""

from shared.ids import DeviceId, Role, replica_id
from shared.planning.cluster import ClusterSpec, ReplicaSlot
from shared.runtime.config import RunConfig


def cluster_of(config: RunConfig) -> ClusterSpec:
    """Every device can host one slot of each role; training uses `training_devices`.

    Where the policy fixes a split, a role has slots on its own devices only: rollout first, then reward, then
    training (for `rollout_reward_colocated`: both on the first, training on the rest).
    """
    devices = range(config.num_devices)
    split = config.cluster.split
    spans: dict[Role, range] = dict.fromkeys(Role, devices)
    if config.policy == "disaggregated":
        first, second = split.rollout, split.rollout + split.reward
        spans = {
            Role.ROLLOUT: devices[:first],
            Role.REWARD: devices[first:second],
            Role.TRAINING: devices[second : second + split.training],
        }
    elif config.policy == "rollout_reward_colocated":
        shared = devices[: len(devices) - split.training]
        spans = {
            Role.ROLLOUT: shared,
            Role.REWARD: shared,
            Role.TRAINING: devices[len(devices) - split.training :],
        }
    elif config.policy in ("static", "rule_based"):
        first, second = split.rollout, split.rollout + split.reward
        lent = devices[second:]
        spans = {Role.ROLLOUT: devices, Role.REWARD: devices, Role.TRAINING: lent}
    slots = [
        ReplicaSlot(replica_id(role, i), role, frozenset(DeviceId(d) for d in span))
        for role in (Role.ROLLOUT, Role.REWARD)
        for i, span in enumerate(_chunks(spans[role], config.tensor_parallel(role)))
    ]
    return ClusterSpec(
        devices=frozenset(DeviceId(d) for d in devices),
        slots=tuple(slots),
        training_devices=frozenset(DeviceId(d) for d in spans[Role.TRAINING]),
    )


def rank_devices(config: RunConfig) -> list[DeviceId]:
    """Device of each rank, in rank order."""
    return sorted(cluster_of(config).training_devices)


def _chunks(span: range, size: int) -> list[range]:
    return [span[i : i + size] for i in range(0, len(span) - size + 1, size)]
