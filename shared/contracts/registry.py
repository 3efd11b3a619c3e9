"""The message types that may appear on the bus, by name. A type not listed here is refused."""

from shared.contracts import base, gps, monitor, planner, rank, replica, reward, role, rollout, trainer
from shared.contracts.base import Message

_TYPES: tuple[type[Message], ...] = (
    base.Done,
    base.Failure,
    gps.PolicyVersion,
    monitor.WorkloadPublished,
    planner.DeviceLease,
    planner.PlanPublished,
    planner.ShiftDown,
    planner.ShiftEvent,
    planner.ShiftStepDone,
    planner.ShiftUp,
    rank.CheckpointSaved,
    rank.LoadCheckpoint,
    rank.RankMoved,
    rank.RankStatus,
    rank.RankStepped,
    rank.RankWrote,
    rank.ReloadStates,
    rank.OffloadStates,
    rank.SaveCheckpoint,
    rank.StageSamples,
    rank.TrainStep,
    rank.WritePolicy,
    replica.AbortSequences,
    replica.RefreshReplica,
    replica.ReplicaRefreshed,
    replica.ReplicaSlept,
    replica.ReplicaTelemetry,
    replica.ReplicaWoke,
    replica.RunSequences,
    replica.SequenceProgress,
    replica.SequencesAborted,
    replica.SleepReplica,
    replica.WakeReplica,
    reward.ScoredSample,
    role.RoleQueue,
    rollout.Trajectory,
    trainer.StepCompleted,
    trainer.TrainingTelemetry,
)

MESSAGE_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in _TYPES}
