"""The cluster a configuration describes: which replica slot and which rank lives on which device."""

from shared.ids import DeviceId, Role, replica_id
from shared.planning.cluster import ClusterSpec, ReplicaSlot
from shared.runtime.config import RunConfig


def cluster_of(config: RunConfig) -> ClusterSpec:
    """Every device can host one slot of each role; training uses the last `num_training_devices`.

    With `disaggregated` and `rollout_reward_colocated` a role has slots on its own devices only: rollout
    first, then reward (for the latter both on the same), then training.
    """
    devices = range(config.num_devices)
    split, num_training = config.cluster.split, config.num_training_devices
    spans: dict[Role, range] = dict.fromkeys(Role, devices)
    spans[Role.TRAINING] = devices[len(devices) - num_training :]
    if config.policy == "disaggregated":
        first, second = split.rollout, split.rollout + split.reward
        spans = {
            Role.ROLLOUT: devices[:first],
            Role.REWARD: devices[first:second],
            Role.TRAINING: devices[second : second + num_training],
        }
    elif config.policy == "rollout_reward_colocated":
        spans[Role.ROLLOUT] = spans[Role.REWARD] = devices[: len(devices) - num_training]
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
