"""Who held which device when, how fast each role went, and when shifts happened. Pure."""

from dataclasses import dataclass, field

from shared.contracts.planner import ShiftEvent
from shared.ids import ReplicaId, Role
from shared.planning.cluster import ClusterSpec

SHIFTING = "shifting"
FREE = "free"


@dataclass(frozen=True, slots=True)
class Span:
    """`device` had `owner` (a role, `shifting` or `free`) from `start_s` to `end_s` (None: still)."""

    device: int
    owner: str
    start_s: float
    end_s: float | None


@dataclass(slots=True)
class Timeline:
    """Built from shift events in order; times are seconds on the run's clock."""

    cluster: ClusterSpec
    spans: list[Span] = field(default_factory=list)
    throughput: list[tuple[float, float, float, float]] = field(default_factory=list)
    """(seconds, rollout tokens/s, reward tokens/s, training tokens/s)"""
    shifts: list[ShiftEvent] = field(default_factory=list)
    _open: dict[int, tuple[str, float]] = field(default_factory=dict)

    def on_shift(self, event: ShiftEvent) -> None:
        if event.phase == "step_done":
            return
        if event.phase == "started":
            for device in event.devices:
                self._set(device, SHIFTING, event.now_s)
            return
        self.shifts.append(event)
        for device in event.devices:
            self._set(device, self._role_of(event.holders.get(device, "")), event.now_s)

    def sample(self, now_s: float, rollout: float, reward: float, training: float) -> None:
        self.throughput.append((now_s, rollout, reward, training))

    def closed(self, now_s: float) -> list[Span]:
        """All spans, the open ones up to `now_s`."""
        still = [Span(device, owner, start, now_s) for device, (owner, start) in sorted(self._open.items())]
        return [*self.spans, *still]

    def device_seconds(self, now_s: float) -> dict[str, float]:
        """Device-seconds by owner: the headline that idle time is read from."""
        total: dict[str, float] = {}
        for span in self.closed(now_s):
            total[span.owner] = total.get(span.owner, 0.0) + (span.end_s or now_s) - span.start_s
        return total

    def shift_seconds(self) -> float:
        return sum(event.duration_s for event in self.shifts)

    def _role_of(self, holder: str) -> str:
        if holder in ("", Role.TRAINING.value):
            return holder or FREE
        return self.cluster.slot(ReplicaId(holder)).role.value

    def _set(self, device: int, owner: str, now_s: float) -> None:
        if device in self._open:
            before, start_s = self._open[device]
            if before == owner:
                return
            self.spans.append(Span(device, before, start_s, now_s))
        self._open[device] = (owner, now_s)


def count_shifts(shifts: list[ShiftEvent]) -> dict[str, int]:
    """Completed planner-made shifts by kind, and failed ones. Bringing up the first allocation is no
    shift."""
    counts = dict.fromkeys(
        ("rollout_to_reward", "reward_to_rollout", "to_training", "from_training", "failed"), 0
    )
    for event in shifts:
        if event.shift_id.startswith("start-"):
            continue
        if event.phase == "failed":
            counts["failed"] += 1
            continue
        counts["to_training"] += event.training_up
        counts["from_training"] += event.training_down
        donors = {name.rsplit("-", 1)[0] for name in event.down_replicas}
        counts["rollout_to_reward"] += event.up_role is Role.REWARD and "rollout" in donors
        counts["reward_to_rollout"] += event.up_role is Role.ROLLOUT and "reward" in donors
    return counts
