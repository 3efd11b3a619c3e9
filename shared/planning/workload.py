"""What the planner knows of the work: one observation of the whole run."""

from dataclasses import dataclass, field
from enum import StrEnum

from shared.ids import Role
from shared.scheduling.sequence import RoleLoad


class TrainingActivity(StrEnum):
    """What training does with its devices."""

    IDLE = "idle"
    """No step has been asked of it."""
    ACTIVE = "active"
    """A step is running: never a donor."""
    DONE = "done"
    """The step is over; if it still holds devices, they may be taken without loss."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The training side of the run."""

    activity: TrainingActivity = TrainingActivity.IDLE
    batch_ready: bool = False
    """Training may begin, or go on, with what is there of the next batch."""
    is_publishing: bool = False
    """A step is over and its version not yet published: prompts for it are about to be issued."""
    is_batch_complete: bool = True
    """What is there is the whole batch; without streaming, nothing less is ever ready."""

    @property
    def is_active(self) -> bool:
        return self.activity is TrainingActivity.ACTIVE


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """Load of both generating roles, and training, at one moment."""

    rollout: RoleLoad = field(default_factory=RoleLoad)
    reward: RoleLoad = field(default_factory=RoleLoad)
    training: TrainingState = field(default_factory=TrainingState)

    def of(self, role: Role) -> RoleLoad:
        """The load of rollout or reward."""
        return self.rollout if role is Role.ROLLOUT else self.reward
