"""A run of one deployment on the simulated cluster.

The schedulers, the planner's policies and the issue bound are those of the services; only engines, training
and the carrying out of a shift are models. Batch k is the k-th block of prompts in issue order, as in the
trainer.

    issue ─► rollout scheduler ─► engines ─► reward scheduler ─► engines ─► batch k complete ─► training ─►
    version
      ▲                                                                                              │
      └──────────────────────────── num_issuable(version, staleness, batch) ◄────────────────────────┘

A shift: leaving replicas are emptied (each abort confirmed), sleep; then the new ones wake, Read, and take
sequences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from shared.errors import PivotError
from shared.ids import ReplicaId, Role, SequenceId, sample_id
from shared.planning.plan import (
    Direction,
    ExecuteShift,
    PlanRecord,
    PlanRecorded,
    ShiftCompleted,
    ShiftFailed,
    ShiftPlan,
    ShiftStarted,
    WorkloadObserved,
)
from shared.planning.policies import make_policy
from shared.planning.workload import TrainingActivity, TrainingState, WorkloadState
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.sequence import (
    FINISHED,
    AbortSequence,
    Rebalance,
    ReplicaDied,
    ReplicaProgressed,
    ReplicaShiftingDown,
    ReplicasShiftedUp,
    RunSequence,
    SchedulerEffect,
    SchedulerEvent,
    SequenceAborted,
    SequenceFinished,
    SequencesRetired,
    SequenceSubmitted,
)
from shared.scheduling.staleness import num_issuable, sample_staleness
from shared.sim.cluster import Engine, EngineModel, Usage
from shared.sim.faults import FaultDraws
from shared.sim.kernel import DECIDE, REPORT, EventQueue
from shared.sim.modes import Mode, RoleCosts, planner_config, start_of, training_shift_s
from shared.sim.run import GENERATING, Account, Options, RunResult, TimelinePoint
from shared.sim.scenarios import Scenario, Shares
from shared.sim.workload import Sample

FIXED_REPORT_S = 15.0
"""Between reports of progress where nothing is decided from them but where to dispatch."""


@dataclass(slots=True)
class _Shift:
    plan: ShiftPlan
    began_s: float
    leaving: Mapping[Role, tuple[ReplicaId, ...]]
    is_emptied: bool = False
    durations: dict[tuple[Role, Direction], float] = field(default_factory=dict)


def engine_models(scenario: Scenario, samples: Sequence[Sample]) -> dict[Role, EngineModel]:
    """The replicas of both roles; the best batch is what fits of sequences as long as those of `samples`."""
    rollout = reward = responses = verdicts = 0.0
    extra = scenario.workload.template_tokens
    for s in samples:
        rollout += s.response * (s.prompt + s.response / 2)
        reward += s.verdict * (s.prompt + s.response + extra + s.verdict / 2)
        responses += s.response
        verdicts += s.verdict
    device = scenario.device
    return {
        Role.ROLLOUT: scenario.policy.engine(device, scenario.policy_tp, rollout / responses),
        Role.REWARD: scenario.genrm.engine(device, scenario.genrm_tp, reward / verdicts),
    }


class Simulation:
    """One run. `run()` plays it to the end."""

    def __init__(self, scenario: Scenario, mode: Mode, shares: Shares, seed: int, options: Options) -> None:
        self.scenario, self.mode, self.shares, self.seed, self.options = scenario, mode, shares, seed, options
        device, work = scenario.device, scenario.workload
        total = options.num_steps + scenario.staleness + 2
        self._batches = [work.batch(seed, k, options.num_steps) for k in range(total)]
        self.engine_models = engine_models(scenario, [s for batch in self._batches for s in batch])
        self._read_s = {
            Role.ROLLOUT: scenario.policy.read_s(device, scenario.policy_tp),
            Role.REWARD: scenario.genrm.read_s(device, scenario.genrm_tp),
        }
        self._max_new = {Role.ROLLOUT: work.response.cap, Role.REWARD: work.verdict.cap}
        costs = {
            role: RoleCosts(
                device.wake_s + self._read_s[role],
                device.sleep_s,
                self.engine_models[role].kv_capacity_tokens,
                self.engine_models[role].prefill_s_per_token,
                options.planning_models.get(role, self.engine_models[role].throughput),
            )
            for role in GENERATING
        }
        self._costs = costs
        self._training_up_s, self._training_down_s = training_shift_s(
            scenario.policy, device, shares.training
        )
        self._write_s = scenario.policy.weight_bytes / shares.training / device.read_bytes_per_s
        self.cluster, start = start_of(scenario, mode, shares)
        config = planner_config(scenario, mode, costs, shares.training, options.planner)
        self.policy = make_policy(config, self.cluster, start)
        self.schedulers = {
            role: Scheduler(
                SchedulerConfig(
                    throughput_model=costs[role].model if mode.use_throughput_model else None,
                    migration=mode.migration,
                    growth_margin_tokens=scenario.growth_margin_tokens,
                    min_gain_share=mode.min_gain_share,
                )
            )
            for role in GENERATING
        }
        self.staleness = 0 if mode.is_synchronous else scenario.staleness
        self.queue = EventQueue()
        self.engines: dict[ReplicaId, Engine] = {}
        self._role_of = {slot.id: slot.role for slot in self.cluster.slots}
        self._samples: dict[SequenceId, Sample] = {}
        self._wake_s: dict[ReplicaId, float] = {}
        self._dirty: dict[ReplicaId, None] = {}
        self._usage = {role: Usage() for role in GENERATING}
        self.version = self.num_issued = self.num_trained = 0
        self._missing = [work.batch_samples] * total
        self._issued_at: dict[SequenceId, int] = {}
        self.max_staleness = 0
        self._training_since_s: float | None = None
        self._holds_since_s = 0.0
        self._training_active_s = self._training_holds_s = self._shifting_device_s = 0.0
        self._shift: _Shift | None = None
        self._settled_s = 0.0
        self._num_shifts = self._num_moves = 0
        self._is_deciding = False
        self._step_ends_s: list[float] = []
        self._decide_ms: list[float] = []
        self._plans: list[PlanRecord] = []
        self._timeline: list[TimelinePoint] = []
        self._start_account: Account | None = None
        self._draws = FaultDraws(options.faults)
        self.num_deaths = self.num_failed_shifts = 0
        self._awaken(sorted(start.active))

    # The run

    def run(self) -> RunResult:
        """Play it until `num_steps` steps are trained. PivotError if nothing moves any more."""
        self._issue()
        self._arrange_deaths()
        if self.mode.is_fixed:
            self.queue.after(FIXED_REPORT_S, self._report_for_ever, REPORT)
        else:
            self._decide_for_ever()
        self._flush()
        if self.options.warmup_steps == 0:
            self._start_account = self._account()
        last_progress = (0, 0.0)
        while self.num_trained < self.options.num_steps:
            if not self.queue.advance():
                raise PivotError(f"{self.mode.name} stands still at {self.queue.now_s:.1f} s")
            self._flush()
            if self.options.on_event:
                self.options.on_event(self)
            if self.num_trained != last_progress[0]:
                last_progress = (self.num_trained, self.queue.now_s)
            elif self.queue.now_s - last_progress[1] > 1e5:
                raise PivotError(
                    f"{self.mode.name} {self.shares}: no step ends after {last_progress[1]:.0f} s; "
                    f"allocation {sorted(self.policy.allocation.active)}"
                )
        assert self._start_account is not None
        first, last = self.options.warmup_steps, self.options.num_steps
        return RunResult(
            self.scenario,
            self.mode,
            self.shares,
            self.seed,
            self.options,
            self._start_account,
            self._account(),
            self.engine_models,
            [sample for batch in self._batches[first:last] for sample in batch],
            self._step_ends_s,
            self._timeline,
            self._decide_ms,
            self._plans,
            self.max_staleness,
            self.queue.num_done,
            self._num_moves,
            self.num_deaths,
            self.num_failed_shifts,
        )

    # Samples

    def _issue(self) -> None:
        work = self.scenario.workload
        count = num_issuable(self.version, self.staleness, work.batch_samples, self.num_issued)
        group = work.samples_per_prompt
        for _ in range(count // group):
            prompt_index = self.num_issued // group
            batch, first = divmod(self.num_issued, work.batch_samples)
            for k in range(group):
                sequence = sample_id(prompt_index, k)
                sample = self._samples[sequence] = self._batches[batch][first + k]
                self._feed(
                    Role.ROLLOUT, SequenceSubmitted(sequence, sample.prompt, self._max_new[Role.ROLLOUT])
                )
            self.num_issued += group

    def _target(self, role: Role, sequence: SequenceId) -> int:
        sample = self._samples[sequence]
        return sample.response if role is Role.ROLLOUT else sample.verdict

    def _on_finished(self, role: Role, sequence: SequenceId) -> None:
        sample = self._samples[sequence]
        if role is Role.ROLLOUT:
            prompt = sample.prompt + sample.response + self.scenario.workload.template_tokens
            self._feed(Role.REWARD, SequenceSubmitted(sequence, prompt, self._max_new[Role.REWARD]))
            return
        del self._samples[sequence]
        batch = int(sequence.split(".", 1)[0]) // self.scenario.workload.prompts_per_step
        self._missing[batch] -= 1
        staleness = sample_staleness(batch, self._issued_at.pop(sequence))
        assert staleness <= self.staleness, (sequence, staleness)
        self.max_staleness = max(self.max_staleness, staleness)
        if self._missing[batch] == 0 and batch == self.num_trained:
            self._maybe_train()
            self._decide_soon()

    # Schedulers and engines

    def _feed(self, role: Role, event: SchedulerEvent) -> None:
        self._carry_out(role, self.schedulers[role].step(event, self.queue.now_s))

    def _carry_out(self, role: Role, effects: list[SchedulerEffect]) -> None:
        scheduler = self.schedulers[role]
        for effect in effects:
            engine = self.engines[effect.replica]
            engine.advance(self.queue.now_s)
            self._dirty[effect.replica] = None
            match effect:
                case RunSequence(_, sequence, attempt):
                    state = scheduler.sequence(sequence)
                    assert state is not None
                    generated = state.generated_tokens
                    engine.run(
                        sequence, attempt, state.length, generated, self._target(role, sequence) - generated
                    )
                    if role is Role.ROLLOUT:
                        self._issued_at.setdefault(sequence, self.version)
                case AbortSequence(replica, sequence, attempt):
                    self._num_moves += 1
                    self._abort(role, replica, sequence, attempt)

    def _abort(self, role: Role, replica: ReplicaId, sequence: SequenceId, attempt: int) -> None:
        stopped = self.engines[replica].abort(sequence)
        if stopped is None:  # it has finished, and that report is on its way
            return
        event = SequenceAborted(sequence, replica, attempt, stopped[1])
        for delay_s in self._draws.deliveries_s():
            self.queue.after(self.scenario.abort_s + delay_s, partial(self._confirm, role, event))

    def _confirm(self, role: Role, event: SequenceAborted) -> None:
        self._feed(role, event)
        self._check_emptied()

    def _awaken(self, replicas: Iterable[ReplicaId]) -> None:
        by_role: dict[Role, list[tuple[ReplicaId, int]]] = {}
        for replica in replicas:
            role = self._role_of[replica]
            model = self.engine_models[role]
            self.engines[replica] = Engine(model, self.queue.now_s)
            by_role.setdefault(role, []).append((replica, model.kv_capacity_tokens))
        for role, awake in by_role.items():
            self._feed(role, ReplicasShiftedUp(tuple(awake)))

    def _remove(self, replica: ReplicaId) -> None:
        engine = self.engines.pop(replica, None)
        if engine is None:  # it died
            return
        engine.advance(self.queue.now_s)
        self._usage[self._role_of[replica]].add(engine.usage)
        self._wake_s.pop(replica, None)
        self._dirty.pop(replica, None)

    def _flush(self) -> None:
        """Set the next event of every engine that something happened to."""
        for replica in self._dirty:
            engine = self.engines[replica]
            due_s = engine.next_event_s()
            if due_s != self._wake_s.get(replica):
                self._wake_s[replica] = due_s
                if due_s < inf:
                    self.queue.at(due_s, self._waker(replica, due_s))
        self._dirty.clear()

    def _waker(self, replica: ReplicaId, due_s: float) -> Callable[[], None]:
        def wake() -> None:
            if self._wake_s.get(replica) == due_s:
                del self._wake_s[replica]
                self._settle(replica)

        return wake

    def _settle(self, replica: ReplicaId) -> None:
        role, engine = self._role_of[replica], self.engines[replica]
        engine.advance(self.queue.now_s)
        self._dirty[replica] = None
        for sequence, attempt, total in engine.settle():
            event = SequenceFinished(sequence, replica, attempt, total)
            for delay_s in self._draws.deliveries_s():
                if delay_s:
                    self.queue.after(delay_s, partial(self._finish, role, event))
                else:
                    self._finish(role, event)

    def _finish(self, role: Role, event: SequenceFinished) -> None:
        self._feed(role, event)
        state = self.schedulers[role].sequence(event.sequence)
        if state is not None and state.place is FINISHED:
            self._feed(role, SequencesRetired((event.sequence,)))
            self._on_finished(role, event.sequence)
        self._check_emptied()
        if not self.mode.is_fixed and self._is_role_empty(role):
            self._decide_soon()

    def _is_role_empty(self, role: Role) -> bool:
        return self.schedulers[role].num_unfinished == 0

    def _report(self) -> None:
        for replica, engine in list(self.engines.items()):
            engine.advance(self.queue.now_s)
            if engine.num_sequences:
                event = ReplicaProgressed(replica, tuple(engine.progress()))
                for delay_s in self._draws.deliveries_s():
                    if delay_s:
                        self.queue.after(delay_s, partial(self._feed, self._role_of[replica], event))
                    else:
                        self._feed(self._role_of[replica], event)

    def _report_for_ever(self) -> None:
        self._report()
        self._mark()
        self.queue.after(FIXED_REPORT_S, self._report_for_ever, REPORT)

    # Training

    @property
    def _is_batch_ready(self) -> bool:
        return self._training_since_s is None and self._missing[self.num_trained] == 0

    def _maybe_train(self) -> None:
        shift = self._shift
        is_leaving = shift is not None and shift.plan.training_down
        if not self._is_batch_ready or is_leaving or not self.policy.allocation.training_holds:
            return
        samples = self._batches[self.num_trained]
        tokens = sum(s.prompt + s.response for s in samples)
        seconds = self.scenario.training_fixed_s + self.scenario.policy.training_s(
            self.scenario.device, self.shares.training, tokens
        )
        self._training_since_s = self.queue.now_s
        self._mark()
        self.queue.after(seconds, self._end_training)

    def _end_training(self) -> None:
        assert self._training_since_s is not None
        self._training_active_s += self.queue.now_s - self._training_since_s
        self._training_since_s = None
        self.num_trained += 1
        self._step_ends_s.append(self.queue.now_s)
        self._mark()
        if self.num_trained == self.options.warmup_steps:
            self._start_account = self._account()
        self.queue.after(self._write_s, self._publish)
        self._maybe_train()
        self._decide_soon()

    def _publish(self) -> None:
        """The new version is committed: active rollout replicas read it, and more may be issued."""
        self.version += 1
        for replica, engine in self.engines.items():
            if self._role_of[replica] is Role.ROLLOUT:
                engine.advance(self.queue.now_s)
                engine.refresh(self._read_s[Role.ROLLOUT])
                self._dirty[replica] = None
        self._issue()
        self._decide_soon()

    # Decisions and shifts

    def _decide_for_ever(self) -> None:
        self._decide()
        self.queue.after(self.scenario.decide_period_s, self._decide_for_ever, DECIDE)

    def _decide_soon(self) -> None:
        if self.mode.is_fixed or self._is_deciding:
            return
        self._is_deciding = True
        self.queue.at(max(self.queue.now_s, self._settled_s), self._decide, DECIDE)

    def _decide(self) -> None:
        self._is_deciding = False
        if self.policy.in_flight is not None or self.queue.now_s < self._settled_s:
            return
        self._report()
        if self.mode.rebalance:
            for role in GENERATING:
                self._feed(role, Rebalance())
        self._mark()
        activity = TrainingActivity.DONE if self.num_trained else TrainingActivity.IDLE
        if self._training_since_s is not None:
            activity = TrainingActivity.ACTIVE
        state = WorkloadState(
            self.schedulers[Role.ROLLOUT].load(),
            self.schedulers[Role.REWARD].load(),
            TrainingState(activity, self._is_batch_ready, is_publishing=self.version < self.num_trained),
        )
        timer = self.options.timer
        before = timer() if timer else 0.0
        effects = self.policy.step(WorkloadObserved(state), self.queue.now_s)
        if timer:
            self._decide_ms.append((timer() - before) * 1e3)
        for effect in effects:
            match effect:
                case PlanRecorded(record):
                    if record.plan is not None:
                        self._plans.append(record)
                case ExecuteShift(plan):
                    self._begin(plan)

    def _begin(self, plan: ShiftPlan) -> None:
        self.policy.step(ShiftStarted(plan.id), self.queue.now_s)
        leaving = {
            role: tuple(r for r in plan.down_replicas if self._role_of[r] is role) for role in GENERATING
        }
        self._shift = _Shift(plan, self.queue.now_s, leaving)
        for role, replicas in leaving.items():
            if replicas:
                self._feed(role, ReplicaShiftingDown(replicas))
        self._check_emptied()

    def _check_emptied(self) -> None:
        shift = self._shift
        if shift is None or shift.is_emptied:
            return
        if not all(self.schedulers[role].is_empty(r) for role, rs in shift.leaving.items() for r in rs):
            return
        shift.is_emptied = True
        now_s, plan = self.queue.now_s, shift.plan
        down_s = 0.0
        for role, replicas in shift.leaving.items():
            for replica in replicas:
                self._remove(replica)
            if replicas:
                seconds = self._costs[role].shift_down_s
                shift.durations[role, Direction.DOWN] = now_s - shift.began_s + seconds
                down_s = max(down_s, seconds)
        if plan.training_down:
            shift.durations[Role.TRAINING, Direction.DOWN] = self._training_down_s
            down_s = max(down_s, self._training_down_s)
            self._training_holds_s += now_s - self._holds_since_s
        up_s = self._training_up_s if plan.training_up else self._costs[plan.up_role].shift_up_s
        shift.durations[plan.up_role, Direction.UP] = up_s
        self._shifting_device_s += len(plan.devices) * (down_s + up_s)
        self._mark()
        faults = self.options.faults
        late_s = faults.late_s if self._draws.happens(faults.late_shifts) else 0.0
        end = self._fail if self._draws.happens(faults.failed_shifts) else self._complete
        self.queue.after(down_s + up_s + late_s, end)

    def _fail(self) -> None:
        """The up-half failed and was rolled back: what left is gone, its devices are free."""
        shift = self._shift
        assert shift is not None
        self._shift = None
        self.num_failed_shifts += 1
        self.policy.step(ShiftFailed(shift.plan.id, "drawn"), self.queue.now_s)
        self._settled_s = self.queue.now_s + self.scenario.settle_s
        self._mark()
        self._maybe_train()
        self._decide_soon()

    def _complete(self) -> None:
        shift = self._shift
        assert shift is not None
        self._shift = None
        self._num_shifts += 1
        self._awaken(shift.plan.up_replicas)
        if shift.plan.training_up:
            self._holds_since_s = self.queue.now_s
        self.policy.step(ShiftCompleted(shift.plan.id, shift.durations), self.queue.now_s)
        self._settled_s = self.queue.now_s + self.scenario.settle_s
        self._mark()
        self._maybe_train()
        self._decide_soon()

    # Deaths

    def _arrange_deaths(self) -> None:
        faults = self.options.faults
        for rate, die in ((faults.deaths_per_s, self._kill_one), (faults.node_deaths_per_s, self._kill_node)):
            if rate > 0.0:
                self.queue.after(self._draws.next_s(rate), partial(self._die_for_ever, rate, die))

    def _die_for_ever(self, rate: float, die: Callable[[], None]) -> None:
        die()
        self.queue.after(self._draws.next_s(rate), partial(self._die_for_ever, rate, die))

    def _kill_one(self) -> None:
        if self.engines:
            self._kill(sorted(self.engines)[self._draws.below(len(self.engines))])

    def _kill_node(self) -> None:
        size = self.options.faults.devices_per_node
        node = self._draws.below(-(-self.scenario.num_devices // size))
        for replica in sorted(self.engines):
            if any(device // size == node for device in self.cluster.slot(replica).devices):
                self._kill(replica)

    def _kill(self, replica: ReplicaId) -> None:
        self.num_deaths += 1
        self._remove(replica)
        self._feed(self._role_of[replica], ReplicaDied(replica))
        self._check_emptied()
        self.queue.after(self.options.faults.restart_s, partial(self._restart, replica))

    def _restart(self, replica: ReplicaId) -> None:
        """A replica that still holds its devices comes back; one that left meanwhile stays asleep."""
        shift = self._shift
        is_leaving = shift is not None and replica in shift.plan.down_replicas
        if replica in self.policy.allocation.active and replica not in self.engines and not is_leaving:
            self._awaken([replica])

    # Accounts

    def _totals(self) -> dict[Role, Usage]:
        totals = {role: replace(usage) for role, usage in self._usage.items()}
        for replica, engine in self.engines.items():
            engine.advance(self.queue.now_s)
            totals[self._role_of[replica]].add(engine.usage)
        return totals

    def _account(self) -> Account:
        holds_s = self._training_holds_s
        is_down = self._shift is not None and self._shift.is_emptied and self._shift.plan.training_down
        if self.policy.allocation.training_holds and not is_down:
            holds_s += self.queue.now_s - self._holds_since_s
        active_s = self._training_active_s
        if self._training_since_s is not None:
            active_s += self.queue.now_s - self._training_since_s
        return Account(
            self.queue.now_s,
            self._totals(),
            active_s,
            holds_s,
            self._shifting_device_s,
            self._num_shifts,
            self.num_trained,
        )

    def _mark(self) -> None:
        devices = dict.fromkeys(GENERATING, 0)
        tokens = {role: usage.tokens for role, usage in self._usage.items()}
        for replica, engine in self.engines.items():
            role = self._role_of[replica]
            devices[role] += engine.model.num_devices
            tokens[role] += engine.usage.tokens
        self._timeline.append(
            TimelinePoint(
                self.queue.now_s,
                devices[Role.ROLLOUT],
                devices[Role.REWARD],
                self._training_since_s is not None,
                tokens[Role.ROLLOUT],
                tokens[Role.REWARD],
            )
        )
