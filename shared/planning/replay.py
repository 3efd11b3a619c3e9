"""What the planner would have decided in a recorded run with other settings.

The run itself is not changed by that: every observation was made under the allocation that the recorded
decisions led to, so each is an independent question, "here and now, what would you do?". A policy with the
recorded settings goes through all events and so knows what the planner knew (shift times, payback, the
allocation); at each observation a copy of it with the changed settings is asked as well.

Model error compares throughput as the model has it with what replicas reported: at each observation on which
something was decided, and after each shift, over the seconds for which its gain was expected to last.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from shared.ids import Role
from shared.planning.config import PlannerConfig
from shared.planning.evaluate import combined_tokens_per_s
from shared.planning.plan import (
    ConfigChanged,
    ManualShiftRequested,
    ShiftCompleted,
    ShiftPlan,
    WorkloadObserved,
)
from shared.planning.policies import make_policy
from shared.planning.policy import ShiftPolicy
from shared.planning.record import Decided, Entry, Started
from shared.planning.workload import WorkloadState
from shared.scheduling.throughput import UNIT

GENERATING = (Role.ROLLOUT, Role.REWARD)
SETTLE_S = 3.0
"""Replicas report a mean over two seconds; what they say right after a shift is of before."""
Change = Callable[[PlannerConfig], PlannerConfig]


@dataclass(frozen=True, slots=True)
class Difference:
    """An observation on which the changed settings decide otherwise."""

    at_s: float
    recorded: Decided
    changed: Decided


@dataclass(frozen=True, slots=True)
class Outcome:
    """A shift of the run: throughput it was chosen for, and what was seen. tokens/s."""

    plan_id: str
    at_s: float
    up_role: Role
    num_up: int
    before: float
    predicted: float
    actual: float | None
    """Mean over the observations until the next shift, at most H; None if there were none with work."""

    @property
    def error(self) -> float | None:
        """(predicted − actual) / actual."""
        return (self.predicted - self.actual) / self.actual if self.actual else None


@dataclass(slots=True)
class Replay:
    """All that a replay found."""

    num_observations: int = 0
    num_decisions: int = 0
    num_reproduced: int = 0
    """Decisions that the recorded settings lead to again; fewer than all if the planner itself changed."""
    num_shifts_recorded: int = 0
    num_shifts_changed: int = 0
    """Observations on which the changed settings want a shift."""
    differences: list[Difference] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    model_errors: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in GENERATING})
    """(modelled − measured) / measured of a role, at observations without a shift under way."""

    def summary(self) -> dict[str, float | int | None]:
        """Counts, and medians of absolute errors."""
        errors = [abs(o.error) for o in self.outcomes if o.error is not None]
        return {
            "observations": self.num_observations,
            "decisions": self.num_decisions,
            "reproduced": self.num_reproduced,
            "differ": len(self.differences),
            "shifts_recorded": self.num_shifts_recorded,
            "shifts_changed": self.num_shifts_changed,
            "shifts_predicted": len(self.outcomes),
            "shift_error_median": round(median(errors), 4) if errors else None,
            **{
                f"{role.value}_model_error_median": round(median(map(abs, seen)), 4) if seen else None
                for role, seen in self.model_errors.items()
            },
        }


def replay(entries: Iterable[Entry], change: Change) -> Replay:
    """Go through a run; `change` makes the settings in question of the recorded ones."""
    return _Replayer(change).run(list(entries))


class _Replayer:
    def __init__(self, change: Change) -> None:
        self._change = change
        self._policy: ShiftPolicy | None = None
        self._found = Replay()

    def run(self, entries: Sequence[Entry]) -> Replay:
        for at, entry in enumerate(entries):
            event = entry.event
            if isinstance(event, Started):
                policy = make_policy(event.config, event.cluster, event.allocation)
                assert isinstance(policy, ShiftPolicy)
                self._policy = policy
            elif self._policy is None:
                continue
            elif event is None:
                self._found.num_observations += 1
            elif isinstance(event, WorkloadObserved):
                self._found.num_observations += 1
                self._observe(self._policy, event.state, entry)
            elif isinstance(event, ManualShiftRequested):
                if entry.decided and entry.decided.plan and not event.dry_run:
                    self._policy.adopt(entry.decided.plan)
            elif isinstance(event, ShiftCompleted):
                self._complete(self._policy, event, entries, at)
            else:
                if isinstance(event, ConfigChanged):
                    self._change(event.config)  # an error is better told now than in the middle
                self._policy.step(event, entry.now_s)
        return self._found

    def _observe(self, policy: ShiftPolicy, state: WorkloadState, entry: Entry) -> None:
        recorded = entry.decided
        if recorded is None:
            return
        found = self._found
        found.num_decisions += 1
        self._compare_with_model(policy, state, entry)
        asked = self._with_change(policy)
        again = policy.decide(state, entry.now_s)
        changed = asked.decide(state, entry.now_s)
        found.num_reproduced += _same(recorded.plan, again.plan)
        found.num_shifts_recorded += recorded.plan is not None
        found.num_shifts_changed += changed.plan is not None
        if not _same(recorded.plan, changed.plan):
            found.differences.append(Difference(entry.now_s, recorded, Decided.of(changed)))
        if recorded.plan is not None:
            policy.adopt(recorded.plan)

    def _with_change(self, policy: ShiftPolicy) -> ShiftPolicy:
        """A policy that knows the same and has the changed settings."""
        config = self._change(policy.config)
        if config.policy != policy.config.policy:
            other = make_policy(config, policy.cluster, policy.allocation)
            assert isinstance(other, ShiftPolicy)
            return other
        shared = (policy.cluster, policy.config)
        twin = copy.deepcopy(policy, {id(value): value for value in shared})
        twin.config = config
        return twin

    def _compare_with_model(self, policy: ShiftPolicy, state: WorkloadState, entry: Entry) -> None:
        for role in GENERATING:
            model = policy.config.of(role).throughput_model or UNIT
            modelled = sum(model.tokens_per_s(r.num_sequences, r.num_tokens) for r in state.of(role).replicas)
            measured = entry.measured.get(role.value, 0.0)
            if modelled > 0 and measured > 0:
                self._found.model_errors[role].append((modelled - measured) / measured)

    def _complete(
        self, policy: ShiftPolicy, event: ShiftCompleted, entries: Sequence[Entry], at: int
    ) -> None:
        plan, now_s = policy.in_flight, entries[at].now_s
        policy.step(event, now_s)
        if plan is None or plan.id != event.plan_id or plan.up_role is Role.TRAINING:
            return
        plans = (e.decided for e in reversed(entries[:at]) if e.decided and e.decided.plan)
        decided = next((d for d in plans if d.plan and d.plan.id == plan.id), None)
        if decided is None or decided.chosen is None:
            return
        actual = _seen(entries[at + 1 :], now_s + SETTLE_S, now_s + policy.config.window_s)
        self._found.outcomes.append(
            Outcome(
                plan.id,
                now_s,
                plan.up_role,
                len(plan.up_replicas),
                decided.current_tokens_per_s,
                decided.chosen.tokens_per_s,
                actual,
            )
        )


def _seen(entries: Iterable[Entry], from_s: float, until_s: float) -> float | None:
    """Mean measured throughput of both roles, combined as the planner combines them, until the next plan."""
    seen: list[float] = []
    for entry in entries:
        if entry.now_s > until_s or isinstance(entry.event, Started):
            break
        if entry.measured and entry.now_s >= from_s:
            numbers = [
                (entry.num_sequences.get(role.value, 0), entry.measured.get(role.value, 0.0))
                for role in GENERATING
            ]
            (n_rollout, t_rollout), (n_reward, t_reward) = numbers
            if n_rollout or n_reward:
                seen.append(combined_tokens_per_s(n_rollout, t_rollout, n_reward, t_reward))
        if entry.decided and entry.decided.plan:
            break
    return mean(seen) if seen else None


def _same(a: ShiftPlan | None, b: ShiftPlan | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.up_role, a.up_replicas, a.down_replicas, a.training_down) == (
        b.up_role,
        b.up_replicas,
        b.down_replicas,
        b.training_down,
    )
