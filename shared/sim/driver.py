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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

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
from shared.scheduling.sequence import Rebalance, ReplicaShiftingDown, SequenceSubmitted
from shared.scheduling.staleness import num_issuable, sample_staleness
from shared.sim.cluster import EngineModel
from shared.sim.faults import FaultDraws
from shared.sim.kernel import DECIDE, REPORT, EventQueue
from shared.sim.modes import Mode, RoleCosts, planner_config, start_of, training_shift_s
from shared.sim.replicas import Replicas
from shared.sim.run import GENERATING, Account, Options, RunResult, TimelinePoint
from shared.sim.scenarios import Scenario, Shares
from shared.sim.training import Training
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
        has_room = all(self.cluster.num_beside_training(role) for role in GENERATING)
        self.streaming = options.streaming if has_room and not mode.is_synchronous else None
        config = planner_config(scenario, mode, costs, shares.training, self.streaming, options.planner)
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
        self._role_of = {slot.id: slot.role for slot in self.cluster.slots}
        self._draws = FaultDraws(options.faults)
        self.replicas = Replicas(
            self.queue,
            self.engine_models,
            self.schedulers,
            self._role_of,
            self._draws,
            self,
            abort_s=scenario.abort_s,
        )
        self.training = Training(
            scenario,
            shares.training,
            self._batches,
            streaming=self.streaming,
            is_dedicated=mode.has_dedicated_training,
        )
        self._samples: dict[SequenceId, Sample] = {}
        self.version = self.num_issued = 0
        self._issued_at: dict[SequenceId, int] = {}
        self.max_staleness = 0
        self._holds_since_s = 0.0
        self._training_holds_s = self._shifting_device_s = 0.0
        self._shift: _Shift | None = None
        self._settled_s = 0.0
        self._num_shifts = 0
        self._is_deciding = False
        self._decide_ms: list[float] = []
        self._plans: list[PlanRecord] = []
        self._timeline: list[TimelinePoint] = []
        self._start_account: Account | None = None
        self.num_deaths = self.num_failed_shifts = 0
        self.replicas.awaken(sorted(start.active))

    # The run

    def run(self) -> RunResult:
        """Play it until `num_steps` steps are trained. PivotError if nothing moves any more."""
        self._issue()
        self._arrange_deaths()
        if self.mode.is_fixed:
            self.queue.after(FIXED_REPORT_S, self._report_for_ever, REPORT)
        else:
            self._decide_for_ever()
        self.replicas.flush()
        if self.options.warmup_steps == 0:
            self._start_account = self._account()
        last_progress = (0, 0.0)
        while self.training.num_trained < self.options.num_steps:
            if not self.queue.advance():
                raise PivotError(f"{self.mode.name} stands still at {self.queue.now_s:.1f} s")
            self.replicas.flush()
            if self.options.on_event:
                self.options.on_event(self)
            if self.training.num_trained != last_progress[0]:
                last_progress = (self.training.num_trained, self.queue.now_s)
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
            self.training.step_ends_s,
            self._timeline,
            self._decide_ms,
            self._plans,
            self.max_staleness,
            self.queue.num_done,
            self.replicas.num_moves,
            self.num_deaths,
            self.num_failed_shifts,
            self.streaming,
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
                submitted = SequenceSubmitted(sequence, sample.prompt, self._max_new[Role.ROLLOUT])
                self.replicas.feed(Role.ROLLOUT, submitted)
            self.num_issued += group

    def num_tokens_of(self, role: Role, sequence: SequenceId) -> int:
        sample = self._samples[sequence]
        return sample.response if role is Role.ROLLOUT else sample.verdict

    def on_started(self, role: Role, sequence: SequenceId) -> None:
        if role is Role.ROLLOUT:
            self._issued_at.setdefault(sequence, self.version)

    def on_finished(self, role: Role, sequence: SequenceId) -> None:
        sample = self._samples[sequence]
        if role is Role.ROLLOUT:
            prompt = sample.prompt + sample.response + self.scenario.workload.template_tokens
            submitted = SequenceSubmitted(sequence, prompt, self._max_new[Role.REWARD])
            self.replicas.feed(Role.REWARD, submitted)
            return
        del self._samples[sequence]
        prompt_index = int(sequence.split(".", 1)[0])
        batch = prompt_index // self.scenario.workload.prompts_per_step
        staleness = sample_staleness(batch, self._issued_at.pop(sequence))
        assert staleness <= self.staleness, (sequence, staleness)
        self.max_staleness = max(self.max_staleness, staleness)
        training = self.training
        was_ready = training.is_ready
        training.scored(prompt_index)
        is_new = training.is_ready and (not was_ready or training.is_batch_complete)
        if batch == training.num_trained and is_new:
            self._maybe_train()
            self._decide_soon()

    def on_stopped(self) -> None:
        self._check_emptied()

    def on_reported_end(self, role: Role) -> None:
        self._check_emptied()
        if not self.mode.is_fixed and self.schedulers[role].num_unfinished == 0:
            self._decide_soon()

    # Training

    def _maybe_train(self) -> None:
        shift = self._shift
        is_leaving = shift is not None and shift.plan.training_down
        if is_leaving or not self.policy.allocation.training_holds or not self.training.is_ready:
            return
        seconds = self.training.begin(self.queue.now_s)
        self._mark()
        self.queue.after(seconds, self._end_training)

    def _end_training(self) -> None:
        is_step = self.training.end(self.queue.now_s)
        self._mark()
        if is_step:
            if self.training.num_trained == self.options.warmup_steps:
                self._start_account = self._account()
            self.queue.after(self._write_s, self._publish)
        self._maybe_train()
        self._decide_soon()

    def _publish(self) -> None:
        """The new version is committed: active rollout replicas read it, and more may be issued."""
        self.version += 1
        self.replicas.refresh(Role.ROLLOUT, self._read_s[Role.ROLLOUT])
        self._issue()
        self._decide_soon()

    # Decisions and shifts

    def _report(self) -> None:
        self.replicas.report()
        if self.mode.rebalance:
            for role in GENERATING:
                self.replicas.feed(role, Rebalance())

    def _report_for_ever(self) -> None:
        self._report()
        self._mark()
        self.queue.after(FIXED_REPORT_S, self._report_for_ever, REPORT)

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
        self._mark()
        training, num_trained = self.training, self.training.num_trained
        activity = TrainingActivity.DONE if num_trained else TrainingActivity.IDLE
        if training.is_active:
            activity = TrainingActivity.ACTIVE
        state = WorkloadState(
            self.schedulers[Role.ROLLOUT].load(),
            self.schedulers[Role.REWARD].load(),
            TrainingState(
                activity,
                training.is_ready,
                is_publishing=self.version < num_trained,
                is_batch_complete=training.is_batch_complete,
            ),
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
                self.replicas.feed(role, ReplicaShiftingDown(replicas))
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
                self.replicas.remove(replica)
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
        self.replicas.awaken(shift.plan.up_replicas)
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
        awake = sorted(self.replicas.engines)
        if awake:
            self._kill(awake[self._draws.below(len(awake))])

    def _kill_node(self) -> None:
        size = self.options.faults.devices_per_node
        node = self._draws.below(-(-self.scenario.num_devices // size))
        for replica in sorted(self.replicas.engines):
            if any(device // size == node for device in self.cluster.slot(replica).devices):
                self._kill(replica)

    def _kill(self, replica: ReplicaId) -> None:
        self.num_deaths += 1
        self.replicas.kill(replica)
        self._check_emptied()
        self.queue.after(self.options.faults.restart_s, partial(self._restart, replica))

    def _restart(self, replica: ReplicaId) -> None:
        """A replica that still holds its devices comes back; one that left meanwhile stays asleep."""
        shift = self._shift
        is_leaving = shift is not None and replica in shift.plan.down_replicas
        is_dead = replica not in self.replicas.engines
        if is_dead and replica in self.policy.allocation.active and not is_leaving:
            self.replicas.awaken([replica])

    # Accounts

    def _account(self) -> Account:
        holds_s = self._training_holds_s
        is_down = self._shift is not None and self._shift.is_emptied and self._shift.plan.training_down
        if self.policy.allocation.training_holds and not is_down:
            holds_s += self.queue.now_s - self._holds_since_s
        return Account(
            self.queue.now_s,
            self.replicas.usage(),
            self.training.active_s(self.queue.now_s),
            holds_s,
            self._shifting_device_s,
            self._num_shifts,
            self.training.num_trained,
        )

    def _mark(self) -> None:
        devices, tokens = self.replicas.devices_and_tokens()
        self._timeline.append(
            TimelinePoint(
                self.queue.now_s,
                devices[Role.ROLLOUT],
                devices[Role.REWARD],
                self.training.is_running,
                tokens[Role.ROLLOUT],
                tokens[Role.REWARD],
            )
        )
