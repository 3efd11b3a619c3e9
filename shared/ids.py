"""Identifiers and the three roles, used by every layer."""

from enum import StrEnum
from typing import NewType


class Role(StrEnum):
    """The three stages of an RL step a device can serve (paper §2.1)."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINING = "training"

    @property
    def opposite(self) -> "Role":
        """The other generating role: the donor that a shift between rollout and reward takes from."""
        if self is Role.ROLLOUT:
            return Role.REWARD
        if self is Role.REWARD:
            return Role.ROLLOUT
        raise ValueError("training has no opposite role")


DeviceId = NewType("DeviceId", int)
"""A GPU, or a CPU slot on a machine without one; numbered over the whole cluster from 0."""

ReplicaId = NewType("ReplicaId", str)
"""`<role>-<slot>`, for example `rollout-0`."""

SequenceId = NewType("SequenceId", str)
"""One generation of the policy or of the GenRM. Sorts in issue order, which is the default dispatch order."""


def replica_id(role: Role, slot: int) -> ReplicaId:
    """`replica_id(Role.ROLLOUT, 0) == "rollout-0"`."""
    return ReplicaId(f"{role.value}-{slot}")


def sample_id(prompt_index: int, sample: int) -> SequenceId:
    """The `sample`-th response to the prompt drawn at `prompt_index`; sorts by prompt, then sample.

    >>> sample_id(12, 3)
    '00000012.03'
    """
    return SequenceId(f"{prompt_index:08d}.{sample:02d}")


def prompt_index_of(sequence: str) -> int:
    """The prompt index inside a sample id (or a reward sequence id derived from one)."""
    return int(sequence.split(".", 1)[0])
