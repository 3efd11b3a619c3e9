"""Devices, the replica slots and training set that may use them, and who holds what now.

Slots of one role never share a device. Slots of different roles do, and that is what a shift trades: a
reward slot over four devices covers four one-device rollout slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import ConfigError
from shared.ids import DeviceId, ReplicaId, Role
from shared.scheduling.migration import tie_order

Owner = ReplicaId | Role
"""A replica, or Role.TRAINING."""


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """A place where a replica of `role` can be active, on exactly these devices."""

    id: ReplicaId
    role: Role
    devices: frozenset[DeviceId]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All devices, all slots of rollout and reward, and the devices training takes as a whole.

    Raises ConfigError naming the field that does not fit.
    """

    devices: frozenset[DeviceId]
    slots: tuple[ReplicaSlot, ...]
    training_devices: frozenset[DeviceId]
    _by_id: dict[ReplicaId, ReplicaSlot] = field(init=False, repr=False, compare=False)
    _by_device: dict[DeviceId, tuple[ReplicaSlot, ...]] = field(init=False, repr=False, compare=False)
    _of_role: dict[Role, tuple[ReplicaSlot, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {slot.id: slot for slot in self.slots})
        covering: dict[DeviceId, tuple[ReplicaSlot, ...]] = {}
        for slot in self.slots:
            for device in slot.devices:
                covering[device] = (*covering.get(device, ()), slot)
        object.__setattr__(self, "_by_device", covering)
        if not self.devices:
            raise ConfigError("devices", None, "the cluster is empty", "List at least one device")
        if len(self._by_id) != len(self.slots):
            raise ConfigError(
                "slots", None, "two slots have the same id", "Number the slots of a role from 0"
            )
        if outside := self.training_devices - self.devices:
            raise ConfigError(
                "training_devices", sorted(outside), "are not in `devices`", "Use devices of this cluster"
            )
        for slot in self.slots:
            self._check_slot(slot)
        by_device = sorted(self.slots, key=lambda s: min(s.devices))
        of_role = {role: tuple(slot for slot in by_device if slot.role is role) for role in Role}
        object.__setattr__(self, "_of_role", of_role)

    def _check_slot(self, slot: ReplicaSlot) -> None:
        name = f"slots[{slot.id}]"
        if slot.role is Role.TRAINING:
            raise ConfigError(
                f"{name}.role", slot.role.value, "training has no slots", "Use training_devices"
            )
        if not slot.devices:
            raise ConfigError(f"{name}.devices", None, "a slot needs a device", "List its devices")
        if outside := slot.devices - self.devices:
            raise ConfigError(
                f"{name}.devices", sorted(outside), "are not in `devices`", "Use devices of this cluster"
            )
        for other in self.overlapping(slot.devices, slot.role):
            if other.id != slot.id:
                raise ConfigError(
                    f"{name}.devices",
                    sorted(slot.devices & other.devices),
                    f"are also in slots[{other.id}] of the same role",
                    "Give every slot of a role its own devices",
                )

    def slot(self, replica: ReplicaId) -> ReplicaSlot:
        """The slot of a replica; KeyError for one that is not of this cluster."""
        return self._by_id[replica]

    def has_slot(self, replica: ReplicaId) -> bool:
        """Whether this cluster has a slot of that id."""
        return replica in self._by_id

    def slots_of(self, role: Role) -> list[ReplicaSlot]:
        """All slots of a role, by lowest device."""
        return list(self._of_role[role])

    def num_beside_training(self, role: Role) -> int:
        """Slots of a role that can be active while training holds its devices."""
        return sum(self.training_devices.isdisjoint(slot.devices) for slot in self._of_role[role])

    def overlapping(self, devices: Iterable[DeviceId], role: Role | None = None) -> list[ReplicaSlot]:
        """Slots (of `role`) that use any of `devices`, in replica order."""
        found = {s.id: s for d in devices for s in self._by_device.get(d, ()) if role in (None, s.role)}
        return [found[replica] for replica in sorted(found, key=tie_order)]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who holds devices now: the active replicas, and training if it holds its devices."""

    active: frozenset[ReplicaId] = frozenset()
    training_holds: bool = False

    def validate(self, cluster: ClusterSpec) -> None:
        """Raises ConfigError if a replica is unknown or a device has two owners."""
        owners: dict[DeviceId, Owner] = {}
        claims: list[tuple[Owner, frozenset[DeviceId]]] = []
        for replica in sorted(self.active, key=tie_order):
            if not cluster.has_slot(replica):
                raise ConfigError("active", replica, "is no slot of this cluster", "Use the id of a slot")
            claims.append((replica, cluster.slot(replica).devices))
        if self.training_holds:
            claims.append((Role.TRAINING, cluster.training_devices))
        for owner, devices in claims:
            for device in devices:
                if device in owners:
                    raise ConfigError(
                        "active",
                        str(owner),
                        f"device {device} is held by {owners[device]}",
                        "Shift one down first",
                    )
                owners[device] = owner

    def owner_of(self, device: DeviceId, cluster: ClusterSpec) -> Owner | None:
        """The replica or Role.TRAINING that holds a device; None for a free one."""
        for slot in cluster.overlapping([device]):
            if slot.id in self.active:
                return slot.id
        return Role.TRAINING if self.training_holds and device in cluster.training_devices else None

    def free_devices(self, cluster: ClusterSpec) -> frozenset[DeviceId]:
        """Devices nobody holds."""
        held = {d for replica in self.active for d in cluster.slot(replica).devices}
        return cluster.devices - held - (cluster.training_devices if self.training_holds else frozenset())

    def active_of(self, role: Role, cluster: ClusterSpec) -> list[ReplicaId]:
        """Active replicas of a role, in replica order."""
        return sorted((r for r in self.active if cluster.slot(r).role is role), key=tie_order)
