"""Every subject, stream and bucket of a run. Nobody builds one by hand.

pivotrl.v1.<run>.<owner>.<noun>[.<id>]
"""

from dataclasses import dataclass

from shared.ids import Role

ROOT = "pivotrl.v1"
POLICY_VERSION_KEY = "version"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A JetStream stream. `file` streams survive the broker; `dedupe_s` is the window for publish ids."""

    name: str
    subjects: tuple[str, ...]
    file: bool
    max_bytes: int = -1
    dedupe_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one run.

    >>> Subjects("demo").replica("rollout-0", "wake")
    'pivotrl.v1.demo.replica.rollout-0.wake'
    """

    run: str

    @property
    def prefix(self) -> str:
        return f"{ROOT}.{self.run}"

    # core publish
    def telemetry(self, role: Role, replica: str) -> str:
        return f"{self.prefix}.telemetry.{role.value}.{replica}"

    def role_queue(self, role: Role) -> str:
        return f"{self.prefix}.queue.{role.value}"

    @property
    def training_state(self) -> str:
        return f"{self.prefix}.telemetry.training.state"

    @property
    def workload(self) -> str:
        return f"{self.prefix}.workload.state"

    @property
    def gps_heartbeat(self) -> str:
        return f"{self.prefix}.gps.heartbeat"

    # request / reply
    def gps_node(self, node: int, command: str) -> str:
        return f"{self.prefix}.gps.node.{node}.{command}"

    def shift(self, role: Role, direction: str) -> str:
        return f"{self.prefix}.shift.{role.value}.{direction}"

    def replica(self, replica: str, command: str) -> str:
        return f"{self.prefix}.replica.{replica}.{command}"

    def rank(self, rank: int, command: str) -> str:
        return f"{self.prefix}.rank.{rank}.{command}"

    # streams
    @property
    def plan(self) -> str:
        return f"{self.prefix}.planner.plan"

    def shift_event(self, shift_id: str) -> str:
        return f"{self.prefix}.planner.shift.{shift_id}"

    def progress(self, role: Role, replica: str) -> str:
        return f"{self.prefix}.sequence.{role.value}.progress.{replica}"

    @property
    def trajectory(self) -> str:
        return f"{self.prefix}.sample.trajectory"

    @property
    def scored(self) -> str:
        return f"{self.prefix}.sample.scored"

    @property
    def step_completed(self) -> str:
        return f"{self.prefix}.training.step"

    @property
    def shifts_stream(self) -> StreamSpec:
        return StreamSpec(
            self._stream("SHIFTS"), (f"{self.prefix}.planner.>",), file=True, max_bytes=256 << 20
        )

    @property
    def progress_stream(self) -> StreamSpec:
        return StreamSpec(
            self._stream("PROGRESS"), (f"{self.prefix}.sequence.>",), file=False, max_bytes=256 << 20
        )

    @property
    def trajectories_stream(self) -> StreamSpec:
        return StreamSpec(self._stream("TRAJECTORIES"), (self.trajectory,), file=True)

    @property
    def scored_stream(self) -> StreamSpec:
        return StreamSpec(self._stream("SCORED"), (self.scored,), file=True)

    @property
    def training_stream(self) -> StreamSpec:
        return StreamSpec(self._stream("TRAINING"), (f"{self.prefix}.training.>",), file=True)

    @property
    def streams(self) -> tuple[StreamSpec, ...]:
        return (
            self.shifts_stream,
            self.progress_stream,
            self.trajectories_stream,
            self.scored_stream,
            self.training_stream,
        )

    # key-value
    @property
    def policy_bucket(self) -> str:
        return f"pivotrl_{self.run}_policy"

    @property
    def gps_bucket(self) -> str:
        """`view`: the nodes of parameter storage; `commit.<model>`: the version that is readable."""
        return f"pivotrl_{self.run}_gps"

    @property
    def device_bucket(self) -> str:
        return f"pivotrl_{self.run}_device"

    def _stream(self, name: str) -> str:
        return f"PIVOTRL_{self.run}_{name}"
