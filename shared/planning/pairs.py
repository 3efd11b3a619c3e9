"""Shift pairs: what the role to shift up can get, and who gives it (paper §7.1, Appendix D.1).

A pair is a set of inactive slots of the up-role and everyone who must leave before any of them can start.
Slots that share a donor belong to one pair, because the donor leaves once for all of them. Slots whose
devices nobody holds form one pair without a donor. Pairs have disjoint devices, so their penalties add up.

A slot is not eligible while training is active on one of its devices.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.ids import DeviceId, ReplicaId, Role
from shared.planning.cluster import Allocation, ClusterSpec, Owner, ReplicaSlot
from shared.scheduling.migration import tie_order

PenaltyOf = Callable[[ReplicaId], float]
"""Tokens not generated because this replica shifts down: τ_shift · T."""


@dataclass(frozen=True, slots=True)
class ShiftPair:
    """The first e of `up_replicas` can start once `down_replicas` (and training, if `training_down`) left."""

    up_replicas: tuple[ReplicaId, ...]
    """By lowest device; taken from the front."""
    down_replicas: tuple[ReplicaId, ...]
    training_down: bool
    penalty_tokens: float
    """φ, paid once however many replicas are taken."""
    lowest_device: DeviceId


def shift_pairs(
    cluster: ClusterSpec,
    allocation: Allocation,
    up_role: Role,
    penalty_of: PenaltyOf,
    *,
    training_active: bool,
) -> list[ShiftPair]:
    """All pairs for `up_role`, by ascending penalty, then lowest device."""
    group_of: dict[Owner, tuple[set[Owner], list[ReplicaSlot]]] = {}
    free: list[ReplicaSlot] = []
    owner_of = _owners(cluster, allocation)
    for slot in cluster.slots_of(up_role):
        if slot.id in allocation.active:
            continue
        owners = {owner for d in slot.devices if (owner := owner_of.get(d)) is not None}
        if training_active and Role.TRAINING in owners:
            continue
        if not owners:
            free.append(slot)
            continue
        slots = [slot]
        for group in {id(group_of[o]): group_of[o] for o in owners if o in group_of}.values():
            owners |= group[0]
            slots += group[1]
        group_of.update(dict.fromkeys(owners, (owners, slots)))
    groups = list({id(group): group for group in group_of.values()}.values())
    if free:
        groups.append((set(), free))
    pairs = [_pair(owners, slots, penalty_of) for owners, slots in groups]
    return sorted(pairs, key=lambda pair: (pair.penalty_tokens, pair.lowest_device))


def _owners(cluster: ClusterSpec, allocation: Allocation) -> dict[DeviceId, Owner]:
    owners: dict[DeviceId, Owner] = {}
    if allocation.training_holds:
        owners = dict.fromkeys(cluster.training_devices, Role.TRAINING)
    for replica in allocation.active:
        owners |= dict.fromkeys(cluster.slot(replica).devices, replica)
    return owners


def _pair(owners: set[Owner], slots: list[ReplicaSlot], penalty_of: PenaltyOf) -> ShiftPair:
    slots = sorted(slots, key=lambda slot: min(slot.devices))
    down = tuple(sorted((o for o in owners if not isinstance(o, Role)), key=tie_order))
    return ShiftPair(
        up_replicas=tuple(slot.id for slot in slots),
        down_replicas=down,
        training_down=Role.TRAINING in owners,
        penalty_tokens=sum(penalty_of(replica) for replica in down),
        lowest_device=min(min(slot.devices) for slot in slots),
    )
