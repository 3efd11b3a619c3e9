"""The planner (paper §7): which role needs devices, who can give them, and whether that pays.

Five steps at every observation: the role to shift up, the shift pairs, one candidate for each number of
replicas, the benefit of each, the best one if it is positive. Paying is measured over a window of H seconds:

    benefit = H · (T_candidate − T_current) − φ        tokens

Liveness, beyond the paper
- When both roles have work and neither has a replica (training just gave all devices back), T is zero with
  any candidate of one role. The other role, stalled before and after, is then left out of both means, so that
  the more pressed role starts; the stalled one is next.
- Training that is not active and holds devices while no batch is ready is a donor that costs nothing.
- Training that has begun with a part of a batch may keep its devices until the rest is there. So it is given
  them for a part only where both roles fit beside it, and, with `training_rest_per_replica`, little is left
  for these to do. Until then the part does not count: generation is planned as if no batch were ready.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from shared.ids import ReplicaId, Role
from shared.planning.candidates import Candidate, candidates
from shared.planning.cluster import Allocation, ClusterSpec
from shared.planning.config import PlannerConfig
from shared.planning.evaluate import RoleReplay, combined_tokens_per_s, generation_latency
from shared.planning.pairs import ShiftPair, shift_pairs
from shared.planning.plan import CandidateRecord, PlanRecord, ShiftPlan
from shared.planning.policy import ShiftPolicy
from shared.planning.workload import TrainingState, WorkloadState

PUBLISHING_LIMIT_S = 30.0
"""A version that is not published this long after its step holds up no decision."""


@dataclass(frozen=True, slots=True)
class _Payback:
    """A shift that has to earn back its cost before it may be reversed."""

    plan: ShiftPlan
    until_s: float


class Planner(ShiftPolicy):
    """`step(WorkloadObserved(state), now_s)` returns the record of the decision, and the shift if any."""

    def __init__(self, config: PlannerConfig, cluster: ClusterSpec, allocation: Allocation) -> None:
        super().__init__(config, cluster, allocation)
        self._gain_tokens_per_s = 0.0
        self._last_completed_s: float | None = None
        self._payback: _Payback | None = None
        self._publishing_since_s: float | None = None

    def decide(self, state: WorkloadState, now_s: float) -> PlanRecord:
        replays = {role: self._replay(state, role) for role in (Role.ROLLOUT, Role.REWARD)}
        training = state.training
        holds = self._allocation.training_holds
        most_left = self._most_left(training)
        num_left = sum(state.of(role).num_sequences for role in replays)
        is_next = training.batch_ready and (holds or num_left <= most_left)
        if is_next and not training.is_active and not holds:
            return self._shift_training_up(training, replays, now_s)
        record = self._decide_generation(state, replays, is_next, now_s)
        if training.batch_ready and not is_next:
            why = f"part of a batch is ready: {num_left} sequences left, {max(0.0, most_left):g} fit"
            record = replace(record, reason=f"{record.reason} ({why})")
        return record

    def _most_left(self, training: TrainingState) -> float:
        """With how many sequences left training is given devices for what is ready; see liveness above."""
        if training.is_batch_complete:
            return inf
        beside = {role: self.cluster.num_beside_training(role) for role in (Role.ROLLOUT, Role.REWARD)}
        return beside[Role.REWARD] * self.config.training_rest_per_replica if all(beside.values()) else -inf

    def _decide_generation(
        self, state: WorkloadState, replays: dict[Role, RoleReplay], is_training_next: bool, now_s: float
    ) -> PlanRecord:
        """For rollout and reward."""
        if self._waits_for_version(state.training, is_training_next, now_s):
            return PlanRecord(now_s, "prompts for the next version are about to come")
        up_role = role_to_shift_up(replays)
        if up_role is None:
            return PlanRecord(now_s, "neither rollout nor reward has sequences")
        if self._last_completed_s is not None and now_s < self._last_completed_s + self.config.cooldown_s:
            return PlanRecord(now_s, "cooling down after the last shift", up_role)
        pairs = self._prepare_pairs(state, up_role, replays[up_role.opposite])
        return self._choose(up_role, pairs, replays, now_s)

    def _waits_for_version(self, training: TrainingState, is_training_next: bool, now_s: float) -> bool:
        """Whether prompts for a new version are about to come; only for so long, should they not."""
        if not training.is_publishing:
            self._publishing_since_s = None
        elif self._publishing_since_s is None:
            self._publishing_since_s = now_s
        since_s = self._publishing_since_s
        is_due = since_s is not None and now_s - since_s < PUBLISHING_LIMIT_S
        return self.config.wait_for_version and is_due and not is_training_next

    def _prepare_pairs(self, state: WorkloadState, up_role: Role, donors: RoleReplay) -> list[ShiftPair]:
        """Step 2. What is ready protects devices that training holds: it is about to begin.

        The penalty of a leaving replica is what it would have generated during the shift, and during the
        prefill of its sequences elsewhere (the paper has the first part only).
        """
        tau_s = self.shift_s(up_role, up_role.opposite)
        prefill_s = self.config.of(up_role.opposite).prefill_s_per_token
        return shift_pairs(
            self.cluster,
            self._allocation,
            up_role,
            lambda replica: (
                (tau_s + prefill_s * donors.num_tokens_of(replica)) * donors.tokens_per_s_of(replica)
            ),
            training_active=state.training.is_active or state.training.batch_ready,
        )

    def _replay(self, state: WorkloadState, role: Role) -> RoleReplay:
        active = self._allocation.active_of(role, self.cluster)
        config = self.config.of(role)
        held = set(active)
        return RoleReplay(
            state.of(role),
            active,
            [slot.id for slot in self.cluster.slots_of(role) if slot.id not in held],
            model=config.throughput_model if self.config.use_throughput_model else None,
            migrate=self.config.migration and self.config.use_throughput_model,
            kv_capacity_tokens=config.kv_capacity_tokens,
            growth_tokens=config.growth_tokens,
            tokens_per_sequence=self._tokens_per_sequence(state, role),
            coming_work=self._coming_work(state, role),
            min_gain_share=config.min_gain_share,
        )

    def _tokens_per_sequence(self, state: WorkloadState, role: Role) -> float:
        """What a sequence of `role` counts; alike as long as either role has not finished any."""
        is_known = state.rollout.mean_new_tokens > 0 and state.reward.mean_new_tokens > 0
        return state.of(role).mean_new_tokens if self.config.length_aware and is_known else 1.0

    def _coming_work(self, state: WorkloadState, role: Role) -> float:
        """Tokens of verdicts still to come from rollout, as far as they count."""
        per_sequence = self._tokens_per_sequence(state, role)
        if role is not Role.REWARD or per_sequence == 1.0:
            return 0.0
        return self.config.upstream_weight * state.rollout.num_sequences * per_sequence

    def _shift_training_up(
        self, training: TrainingState, replays: dict[Role, RoleReplay], now_s: float
    ) -> PlanRecord:
        plan = self.plan_for(Role.TRAINING)
        penalty = 0.0
        for replica in plan.down_replicas:
            role = self.cluster.slot(replica).role
            penalty += self.shift_s(Role.TRAINING, role) * replays[role].tokens_per_s_of(replica)
        plan = replace(plan, penalty_tokens=penalty)
        what = "the next batch" if training.is_batch_complete else "part of the next batch"
        return PlanRecord(now_s, f"{what} is ready: training takes its devices", Role.TRAINING, plan)

    def _choose(
        self, up_role: Role, pairs: list[ShiftPair], replays: dict[Role, RoleReplay], now_s: float
    ) -> PlanRecord:
        current = self._combined(replays, up_role, replays[up_role].tokens_per_s, None)
        num_active = len(self._allocation.active_of(up_role, self.cluster))
        limit = self.config.of(up_role).max_replicas
        max_up = sum(len(pair.up_replicas) for pair in pairs)
        if limit is not None:
            max_up = min(max_up, limit - num_active)
        if max_up <= 0:
            reason = f"{up_role} is more pressed but can get no further replica"
            return PlanRecord(now_s, reason, up_role, current_tokens_per_s=current)
        found = candidates(pairs, max_up)

        def judge(i: int) -> CandidateRecord:
            return self._judge(up_role, found[i], replays, current, now_s)

        def bound(before: CandidateRecord, after: CandidateRecord, i: int) -> float:
            """Throughput of the up-role as in `after`, of the donor as in `before`, at the penalty of `i`."""
            up, down = _split(up_role, after)[0], _split(up_role, before)[1]
            tokens_per_s = self._combined(replays, up_role, up, down)
            slack = self.config.bound_slack * current
            return self.config.window_s * (tokens_per_s - current + slack) - found.penalty_tokens(i)

        if self.config.exact:
            judged = [judge(i) for i in range(len(found))]
        else:
            judged = list(search(len(found), judge, bound, self.config.max_evaluated).values())
        best: int | None = None
        for i, candidate in enumerate(judged):
            if worth(candidate) > 0 and (best is None or worth(candidate) > worth(judged[best])):
                best = i
        if best is None:
            refusals = {c.refusal for c in judged if c.benefit_tokens > 0}
            reason = f"{up_role} is more pressed but no shift pays"
            if refusals:
                reason = f"{up_role} is more pressed but {'; '.join(sorted(refusals))}"
            return PlanRecord(now_s, reason, up_role, None, current, tuple(judged))
        chosen = judged[best] = replace(judged[best], is_chosen=True)
        plan = self.make_plan(
            up_role, chosen.up_replicas, chosen.down_replicas, chosen.training_down, chosen.penalty_tokens
        )
        self._gain_tokens_per_s = chosen.tokens_per_s - current
        reason = (
            f"{len(chosen.up_replicas)} more for {up_role}: {current:.0f} to {chosen.tokens_per_s:.0f} "
            f"tokens/s for {chosen.penalty_tokens:.0f} tokens, benefit {chosen.benefit_tokens:.0f}"
        )
        return PlanRecord(now_s, reason, up_role, plan, current, tuple(judged))

    def _judge(
        self,
        up_role: Role,
        candidate: Candidate,
        replays: dict[Role, RoleReplay],
        current: float,
        now_s: float,
    ) -> CandidateRecord:
        up, moved_tokens = replays[up_role].after_shift_up(candidate.up_replicas)
        down = replays[up_role.opposite].after_shift_down(candidate.down_replicas)
        after = self._combined(replays, up_role, up, down)
        num_after = len(self._allocation.active_of(up_role, self.cluster)) + candidate.num_up
        prefill_s = self.config.of(up_role).prefill_s_per_token * moved_tokens
        penalty = candidate.penalty_tokens + prefill_s * up / num_after
        return CandidateRecord(
            up_replicas=candidate.up_replicas,
            down_replicas=candidate.down_replicas,
            training_down=candidate.training_down,
            penalty_tokens=penalty,
            rollout_tokens_per_s=up if up_role is Role.ROLLOUT else down,
            reward_tokens_per_s=up if up_role is Role.REWARD else down,
            tokens_per_s=after,
            benefit_tokens=self.config.window_s * (after - current) - penalty,
            refusal=self._refusal(up_role, candidate, now_s),
        )

    def _combined(
        self, replays: dict[Role, RoleReplay], up_role: Role, up: float, down: float | None
    ) -> float:
        """T with the up-role at `up` and the other at `down` (None: as it is); see liveness above."""
        other = replays[up_role.opposite]
        both_stalled = other.tokens_per_s == 0 and replays[up_role].tokens_per_s == 0
        n_other = 0.0 if both_stalled else other.work
        return combined_tokens_per_s(
            replays[up_role].work, up, n_other, other.tokens_per_s if down is None else down
        )

    def _refusal(self, up_role: Role, candidate: Candidate, now_s: float) -> str:
        donor = up_role.opposite
        minimum = self.config.of(donor).min_replicas
        if candidate.down_replicas and minimum:
            left = len(self._allocation.active_of(donor, self.cluster)) - len(candidate.down_replicas)
            if left < minimum:
                return f"{donor} keeps at least {minimum} replicas"
        if self._would_reverse(candidate.down_replicas, candidate.penalty_tokens, now_s):
            assert self._payback is not None
            return f"{self._payback.plan.id} has not paid back yet"
        return ""

    def _would_reverse(self, down: tuple[ReplicaId, ...], penalty_tokens: float, now_s: float) -> bool:
        guarded = self._payback
        if (
            not self.config.payback_guard
            or guarded is None
            or penalty_tokens <= 0
            or now_s >= guarded.until_s
        ):
            return False
        return not set(down).isdisjoint(guarded.plan.up_replicas)

    def on_completed(self, plan: ShiftPlan, now_s: float) -> None:
        self._last_completed_s = now_s
        if plan.training_up or plan.penalty_tokens <= 0 or self._gain_tokens_per_s <= 0:
            return
        payback_s = min(plan.penalty_tokens / self._gain_tokens_per_s, self.config.window_s)
        self._payback = _Payback(plan, now_s + payback_s)


def _split(up_role: Role, record: CandidateRecord) -> tuple[float, float]:
    """Throughput of the up-role and of the other."""
    rollout, reward = record.rollout_tokens_per_s, record.reward_tokens_per_s
    return (rollout, reward) if up_role is Role.ROLLOUT else (reward, rollout)


def worth(candidate: CandidateRecord) -> float:
    """What choosing it would bring, tokens; nothing can bring a refused one."""
    return -inf if candidate.refusal else candidate.benefit_tokens


def search(
    num_candidates: int,
    judge: Callable[[int], CandidateRecord],
    bound: Callable[[CandidateRecord, CandidateRecord, int], float],
    max_evaluated: int,
) -> dict[int, CandidateRecord]:
    """Judged candidates by ascending index, the best one among them; few of many are judged.

    Candidates are in the order of replicas gained: along them the up-role's throughput never falls and the
    donor's never rises. So between two judged ones nothing is worth more than `bound(before, after, i)`, i
    the index of the first between, and a gap whose bound does not reach the best so far holds nothing better.
    Gaps are halved, the most promising first.
    """
    judged: dict[int, CandidateRecord] = {}
    if not num_candidates:
        return judged
    best = 0.0

    def look(i: int) -> None:
        nonlocal best
        judged[i] = judge(i)
        best = max(best, worth(judged[i]))

    gaps: list[tuple[float, int, int]] = []

    def open_gap(low: int, high: int) -> None:
        if high - low > 1:
            heapq.heappush(gaps, (-bound(judged[low], judged[high], low + 1), low, high))

    look(0)
    if num_candidates > 1:
        look(num_candidates - 1)
    open_gap(0, num_candidates - 1)
    while gaps and len(judged) < max_evaluated:
        promise, low, high = heapq.heappop(gaps)
        if -promise <= 0.0 or -promise < best:
            break
        middle = (low + high) // 2
        look(middle)
        open_gap(low, middle)
        open_gap(middle, high)
    return dict(sorted(judged.items()))


def role_to_shift_up(replays: dict[Role, RoleReplay]) -> Role | None:
    """Step 1 without training: the larger τ; equal, the larger N; equal, rollout. None without work."""
    pressure = {
        role: (generation_latency(replay.work, replay.tokens_per_s), replay.work)
        for role, replay in replays.items()
    }
    if not any(n for _, n in pressure.values()):
        return None
    return max((Role.ROLLOUT, Role.REWARD), key=lambda role: pressure[role])
