"""Telemetry in, workload state out. Pure: values and `now_s` are handed in."""

from dataclasses import dataclass, field

from shared.contracts.monitor import ReplicaWorkload, RoleWorkload, WorkloadPublished
from shared.contracts.replica import ReplicaTelemetry
from shared.contracts.role import RoleQueue
from shared.contracts.trainer import TrainingTelemetry
from shared.ids import Role

STALE_S = 5.0
"""A replica silent for longer does not count towards throughput."""


@dataclass(slots=True)
class WorkloadAggregator:
    """The latest of everything. `state(now_s)` is what the planner sees.

    A role's load comes from its scheduler (who also knows what is on its way to a replica); telemetry adds
    measured speed. `expected_replicas` and the trainer must all have reported before the state is `ready`.
    """

    expected_replicas: frozenset[str]
    queues: dict[Role, RoleQueue] = field(default_factory=dict)
    telemetry: dict[str, ReplicaTelemetry] = field(default_factory=dict)
    seen_s: dict[str, float] = field(default_factory=dict)
    training: TrainingTelemetry | None = None
    _tokens_of_former_lives: dict[str, int] = field(default_factory=dict)

    def on_queue(self, queue: RoleQueue) -> None:
        self.queues[queue.role] = queue

    def on_telemetry(self, telemetry: ReplicaTelemetry, now_s: float) -> None:
        name = telemetry.replica_id
        before = self.telemetry.get(name)
        if before is not None and before.incarnation != telemetry.incarnation:
            former = self._tokens_of_former_lives.get(name, 0)
            self._tokens_of_former_lives[name] = former + before.generated_tokens_total
        self.telemetry[name] = telemetry
        self.seen_s[telemetry.replica_id] = now_s

    def on_training(self, training: TrainingTelemetry) -> None:
        self.training = training

    def missing(self) -> list[str]:
        """What has not reported yet, by name."""
        waiting = [
            name
            for name in sorted(self.expected_replicas)
            if name not in self.telemetry or self.telemetry[name].state == "starting"
        ]
        waiting += [role.value for role in (Role.ROLLOUT, Role.REWARD) if role not in self.queues]
        if self.training is None or self.training.activity == "starting":
            waiting.append("training")
        return waiting

    def state(self, now_s: float) -> WorkloadPublished:
        training = self.training
        return WorkloadPublished(
            now_s=now_s,
            rollout=self._role(Role.ROLLOUT),
            reward=self._role(Role.REWARD),
            training_activity=training.activity if training else "starting",
            training_holds_devices=training.holds_devices if training else False,
            batch_ready=training.batch_ready if training else False,
            collected=training.collected if training else 0,
            needed=training.needed if training else 0,
            step=training.step if training else 0,
            policy_version=training.policy_version if training else 0,
            finished=training.finished if training else False,
            ready=not self.missing(),
            training_phase=training.phase if training else "",
        )

    def tokens_per_s(self, role: Role, now_s: float) -> float:
        """Measured generation speed of a role, over its living replicas."""
        return sum(
            t.tokens_per_s
            for name, t in self.telemetry.items()
            if t.role is role and t.state == "awake" and now_s - self.seen_s[name] < STALE_S
        )

    def generated_tokens(self, role: Role) -> int:
        """Since the start of this process, restarts of replicas included."""
        return sum(
            t.generated_tokens_total + self._tokens_of_former_lives.get(name, 0)
            for name, t in self.telemetry.items()
            if t.role is role
        )

    def _role(self, role: Role) -> RoleWorkload:
        queue = self.queues.get(role)
        if queue is None:
            return RoleWorkload(role=role, replicas=(), waiting_lengths=(), outstanding=0)
        loads = {replica.replica_id: replica for replica in queue.replicas}
        replicas = []
        for name in queue.active_replicas:
            load, measured = loads.get(name), self.telemetry.get(name)
            replicas.append(
                ReplicaWorkload(
                    replica_id=name,
                    lengths=load.lengths if load else (),
                    kv_capacity_tokens=load.kv_capacity_tokens if load else 0,
                    tokens_per_s=measured.tokens_per_s if measured else 0.0,
                    step_latency_s=measured.step_latency_s if measured else 0.0,
                )
            )
        return RoleWorkload(
            role=role,
            replicas=tuple(replicas),
            waiting_lengths=queue.waiting_lengths,
            outstanding=queue.outstanding,
            blocked_on=queue.blocked_on,
            mean_new_tokens=queue.mean_new_tokens,
        )
