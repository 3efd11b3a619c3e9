"""Clusters and allocations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import cluster

from shared.errors import ConfigError
from shared.ids import DeviceId, ReplicaId, Role
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot

D = [DeviceId(i) for i in range(4)]


def slot(name, *devices):
    return ReplicaSlot(ReplicaId(name), Role(name.split("-")[0]), frozenset(devices))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (lambda: ClusterSpec(frozenset(), (), frozenset()), "devices"),
        (lambda: ClusterSpec(frozenset(D), (), frozenset([DeviceId(9)])), "training_devices"),
        (
            lambda: ClusterSpec(frozenset(D), (slot("rollout-0", DeviceId(7)),), frozenset()),
            "slots[rollout-0].devices",
        ),
        (lambda: ClusterSpec(frozenset(D), (slot("rollout-0"),), frozenset()), "slots[rollout-0].devices"),
        (
            lambda: ClusterSpec(frozenset(D), (slot("training-0", D[0]),), frozenset()),
            "slots[training-0].role",
        ),
        (
            lambda: ClusterSpec(
                frozenset(D), (slot("rollout-0", D[0]), slot("rollout-1", D[0])), frozenset()
            ),
            "slots[rollout-0].devices",
        ),
        (lambda: ClusterSpec(frozenset(D), (slot("rollout-0", D[0]),) * 2, frozenset()), "slots"),
    ],
)
def test_a_cluster_that_cannot_work_names_the_field(spec, field):
    with pytest.raises(ConfigError) as error:
        spec()
    assert error.value.field == field


def test_owners_and_free_devices():
    spec = cluster(8, reward_tp=4, training=2)
    allocation = Allocation(frozenset([ReplicaId("reward-1"), ReplicaId("rollout-2")]), True)
    allocation.validate(spec)
    assert allocation.owner_of(DeviceId(0), spec) is Role.TRAINING
    assert allocation.owner_of(DeviceId(2), spec) == "rollout-2"
    assert allocation.owner_of(DeviceId(7), spec) == "reward-1"
    assert allocation.owner_of(DeviceId(3), spec) is None
    assert allocation.free_devices(spec) == {3}


@pytest.mark.parametrize(
    "allocation",
    [
        Allocation(frozenset([ReplicaId("reward-0"), ReplicaId("rollout-3")])),
        Allocation(frozenset([ReplicaId("rollout-1")]), True),
        Allocation(frozenset([ReplicaId("rollout-99")])),
    ],
)
def test_a_device_has_one_owner_and_a_replica_a_slot(allocation):
    with pytest.raises(ConfigError, match="active"):
        allocation.validate(cluster(8, reward_tp=4, training=2))


@given(st.sets(st.integers(0, 7)), st.booleans())
def test_every_device_is_free_or_owned(slots, training):
    spec = cluster(8, training=0)
    allocation = Allocation(frozenset(ReplicaId(f"rollout-{i}") for i in slots), training)
    free = allocation.free_devices(spec)
    for device in spec.devices:
        assert (allocation.owner_of(device, spec) is None) == (device in free)
