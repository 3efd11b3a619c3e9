"""Many seeds of random faults: the invariants hold and every run ends.

A failing seed is printed in the test's name; add it to FOUND with the mode, so that it stays a case.
`pytest tests/sim --fault-seeds 200` draws more of them.
"""

import random

import pytest

from shared.ids import Role
from shared.scheduling.sequence import Phase
from shared.scheduling.streaming import STREAMING
from shared.sim.faults import Faults
from shared.sim.modes import MODES
from shared.sim.report import describe
from tests.support.sim_cases import SMALL, simulate

GENERATING = (Role.ROLLOUT, Role.REWARD)
FOUND = [("rollout_reward_colocated", 6)]
"""(mode, seed): after a failed shift nobody held a device and nobody was given one."""


def faults_of(seed):
    """A different mix of faults for every seed."""
    rng = random.Random(seed)
    return Faults(
        seed=seed,
        deaths_per_s=rng.choice([0.0, 0.02, 0.1]),
        node_deaths_per_s=rng.choice([0.0, 0.01]),
        devices_per_node=4,
        restart_s=rng.choice([2.0, 15.0]),
        failed_shifts=rng.choice([0.0, 0.2, 0.5]),
        late_shifts=rng.choice([0.0, 0.3]),
        late_s=10.0,
        late_messages=rng.choice([0.0, 0.3, 0.8]),
        repeated_messages=rng.choice([0.0, 0.3]),
    )


class Watch:
    """Checks a run after every event, and everything that is everywhere from time to time."""

    def __init__(self):
        self.num_events = 0
        self.generated = {}

    def __call__(self, run):
        self.num_events += 1
        plan = run.policy.in_flight
        run.policy.allocation.validate(run.cluster)
        if plan is not None:
            plan.apply(run.policy.allocation).validate(run.cluster)
        awake = [d for replica in run.replicas.engines for d in run.cluster.slot(replica).devices]
        assert len(awake) == len(set(awake)), "two awake replicas share a device"
        assert run.num_issued <= (run.version + 1 + run.staleness) * SMALL.workload.batch_samples
        assert min(run.training.missing) >= 0, "a sample was scored twice"
        if self.num_events % 50 == 0:
            self.check_places(run)

    def check_places(self, run):
        unscored = set(run._samples)
        assert len(unscored) == sum(run.training.missing) - len(
            run._batches
        ) * SMALL.workload.batch_samples + (run.num_issued)
        known = {role: run.schedulers[role]._sequences for role in GENERATING}
        for sequence in unscored:
            homes = [role for role in GENERATING if sequence in known[role]]
            assert len(homes) == 1, f"{sequence} is in {homes or 'no scheduler'}"
        for role, states in known.items():
            for sequence, state in states.items():
                before = self.generated.get((role, sequence), 0)
                assert state.generated_tokens >= before, "generated tokens went down"
                self.generated[role, sequence] = state.generated_tokens
                if state.place.phase is Phase.RUNNING:
                    assert sequence in run.schedulers[role]._on[state.place.replica]


def play(mode, seed, streaming="off"):
    watch = Watch()
    result = simulate(
        mode,
        seed=seed,
        num_steps=4,
        warmup_steps=1,
        streaming=STREAMING[streaming],
        faults=faults_of(seed),
        on_event=watch,
    )
    assert len(result.step_ends_s) == 4
    assert result.max_staleness <= (0 if MODES[mode].is_synchronous else SMALL.staleness)
    assert 0 < describe(result)["efficiency"] <= 1.0
    return result


def test_a_run_under_faults_keeps_the_invariants(fault_mode, fault_streaming, fault_seed):
    play(fault_mode, fault_seed, fault_streaming)


@pytest.mark.parametrize(("mode", "seed"), FOUND)
def test_runs_that_once_failed(mode, seed):
    play(mode, seed)


def test_faults_do_happen_and_repeat():
    first, second = (play("pivot", 3) for _ in range(2))
    assert describe(first) == describe(second)
    results = [play("pivot", seed) for seed in range(4)]
    assert sum(r.num_deaths for r in results) > 0
    assert sum(r.num_failed_shifts for r in results) > 0
