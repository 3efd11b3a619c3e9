"""Shift pairs."""

from hypothesis import given
from hypothesis import strategies as st
from planning_cases import cluster

from shared.ids import DeviceId, ReplicaId, Role, replica_id
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot
from shared.planning.pairs import shift_pairs

TOKENS = {f"{role}-{i}": 10.0 * (i + 1) for role in ("rollout", "reward") for i in range(16)}


def pairs(spec, allocation, up, active=False):
    return shift_pairs(spec, allocation, up, TOKENS.__getitem__, training_active=active)


def alloc(*active, training=False):
    return Allocation(frozenset(ReplicaId(a) for a in active), training)


def test_a_wide_slot_takes_every_narrow_replica_it_covers():
    found = pairs(cluster(8, reward_tp=4), alloc(*(f"rollout-{i}" for i in range(8))), Role.REWARD)
    assert [(p.up_replicas, p.down_replicas, p.penalty_tokens) for p in found] == [
        (("reward-0",), tuple(f"rollout-{i}" for i in range(4)), 100.0),
        (("reward-1",), tuple(f"rollout-{i}" for i in range(4, 8)), 260.0),
    ]


def test_a_wide_donor_makes_room_for_several_narrow_replicas():
    (found,) = pairs(cluster(4, reward_tp=4), alloc("reward-0"), Role.ROLLOUT)
    assert found.up_replicas == ("rollout-0", "rollout-1", "rollout-2", "rollout-3")
    assert found.down_replicas == ("reward-0",)
    assert found.penalty_tokens == 10.0


def test_free_devices_and_idle_training_cost_nothing_and_active_training_gives_nothing():
    spec = cluster(6, training=2)
    state = alloc("rollout-2", "rollout-3", training=True)
    free, training = pairs(spec, state, Role.REWARD)[1], pairs(spec, state, Role.REWARD)[0]
    assert (training.up_replicas, training.training_down) == (("reward-0", "reward-1"), True)
    assert (free.up_replicas, free.down_replicas, free.training_down) == (("reward-4", "reward-5"), (), False)
    assert training.penalty_tokens == free.penalty_tokens == 0
    assert [p.up_replicas for p in pairs(spec, state, Role.REWARD, active=True)] == [
        ("reward-4", "reward-5"),
        ("reward-2",),
        ("reward-3",),
    ]


def test_a_slot_between_training_and_a_replica_needs_both_to_leave():
    spec = cluster(4, reward_tp=4, training=2)
    (found,) = pairs(spec, alloc("rollout-3", training=True), Role.REWARD)
    assert (found.down_replicas, found.training_down) == (("rollout-3",), True)
    assert pairs(spec, alloc("rollout-3", training=True), Role.REWARD, active=True) == []


def test_partly_free_devices_only_cost_their_owner():
    (found,) = pairs(cluster(4, reward_tp=4), alloc("rollout-1"), Role.REWARD)
    assert (found.up_replicas, found.down_replicas) == (("reward-0",), ("rollout-1",))


@st.composite
def situations(draw):
    """Random slot widths over random devices, with a random legal allocation."""
    num = draw(st.integers(1, 10))
    slots = []
    for role in (Role.ROLLOUT, Role.REWARD):
        devices = draw(st.permutations(range(num)))
        at = i = 0
        while at < num:
            width = draw(st.integers(1, 4))
            chosen = frozenset(map(DeviceId, devices[at : at + width]))
            slots.append(ReplicaSlot(replica_id(role, i), role, chosen))
            at, i = at + width, i + 1
    training = frozenset(map(DeviceId, draw(st.sets(st.integers(0, num - 1)))))
    spec = ClusterSpec(frozenset(map(DeviceId, range(num))), tuple(slots), training)
    holds = draw(st.booleans())
    taken, active = set(training if holds else ()), set()
    for slot in draw(st.permutations(slots)):
        if taken.isdisjoint(slot.devices) and draw(st.booleans()):
            active.add(slot.id)
            taken |= slot.devices
    return spec, Allocation(frozenset(active), holds)


@given(situations(), st.sampled_from([Role.ROLLOUT, Role.REWARD]), st.booleans())
def test_pairs_are_disjoint_sorted_and_complete(situation, up, active):
    spec, allocation = situation
    found = pairs(spec, allocation, up, active)
    order = [(p.penalty_tokens, p.lowest_device) for p in found]
    assert order == sorted(order)
    seen_up, seen_devices = set(), set()
    for pair in found:
        wanted = {d for r in pair.up_replicas for d in spec.slot(r).devices}
        given_ = {d for r in pair.down_replicas for d in spec.slot(r).devices}
        owners = {allocation.owner_of(d, spec) for d in wanted} - {None}
        assert owners == set(pair.down_replicas) | ({Role.TRAINING} if pair.training_down else set())
        assert not (active and pair.training_down)
        assert all(spec.slot(r).role is up.opposite for r in pair.down_replicas)
        assert seen_devices.isdisjoint(wanted | given_)
        assert [min(spec.slot(r).devices) for r in pair.up_replicas] == sorted(
            min(spec.slot(r).devices) for r in pair.up_replicas
        )
        seen_devices |= wanted | given_
        seen_up |= set(pair.up_replicas)
    for slot in spec.slots_of(up):
        blocked = active and any(allocation.owner_of(d, spec) is Role.TRAINING for d in slot.devices)
        clash = any(
            spec.slot(o).role is up
            for d in slot.devices
            if isinstance(o := allocation.owner_of(d, spec), str) and o is not Role.TRAINING
        )
        assert (slot.id in seen_up) == (slot.id not in allocation.active and not blocked and not clash)
