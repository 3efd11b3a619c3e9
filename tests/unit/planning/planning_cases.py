"""Small clusters and workloads for the planning tests."""

from shared.ids import DeviceId, Role, replica_id
from shared.planning.cluster import ClusterSpec, ReplicaSlot
from shared.scheduling.sequence import ReplicaLoad, RoleLoad


def cluster(num_devices, rollout_tp=1, reward_tp=1, training=None):
    """Slots of both roles over all devices; training on the first `training` devices (default: all)."""
    slots = [
        ReplicaSlot(
            replica_id(role, first // width), role, frozenset(map(DeviceId, range(first, first + width)))
        )
        for role, width in ((Role.ROLLOUT, rollout_tp), (Role.REWARD, reward_tp))
        for first in range(0, num_devices - width + 1, width)
    ]
    devices = frozenset(map(DeviceId, range(num_devices)))
    held = devices if training is None else frozenset(map(DeviceId, range(training)))
    return ClusterSpec(devices, tuple(slots), held)


def replica(role, slot, lengths, capacity=1_000_000):
    lengths = tuple(sorted(lengths))
    return ReplicaLoad(replica_id(role, slot), len(lengths), sum(lengths), capacity, lengths)


def load(role, by_slot, queue=(), capacity=1_000_000):
    """`by_slot`: slot → lengths."""
    return RoleLoad(
        tuple(replica(role, slot, lengths, capacity) for slot, lengths in sorted(by_slot.items())),
        tuple(queue),
    )
