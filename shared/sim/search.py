"""The best split of a scenario, by search over all feasible ones: the opponent that counts.

Every split has a step time it cannot beat: the work of its busiest role at peak throughput over that
role's devices. Splits are simulated in the order of that bound on one seed, until the next bound is no
better than the best simulated so far: so the rest is searched without being run. The best few run again in
full. Training's share is searched too, and with streaming, when training begins. Where lengths drift, every
split plays the whole drift.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shared.errors import PivotError
from shared.scheduling.streaming import STREAMING, StreamingName
from shared.sim.driver import Simulation, engine_models
from shared.sim.modes import MODES, Mode
from shared.sim.report import describe, fluid_bound
from shared.sim.run import Options
from shared.sim.scenarios import Scenario, Shares

_STEPS_A_SIDE = 16


def feasible_splits(scenario: Scenario, mode: Mode) -> Iterator[Shares]:
    """Splits in whole replicas of both models; each share in steps of at least a 16th of the devices."""
    devices = scenario.num_devices
    coarsest = max(1, devices // _STEPS_A_SIDE)
    unit_rollout = max(scenario.policy_tp, coarsest)
    unit_reward = max(scenario.genrm_tp, coarsest)
    if mode.policy != "disaggregated":
        unit = unit_rollout
        most = devices if mode.policy == "pivot" else devices - unit
        yield from (Shares(0, 0, training) for training in range(unit, most + 1, unit))
        return
    for reward in range(unit_reward, devices, unit_reward):
        for rollout in range(unit_rollout, devices - reward, unit_rollout):
            yield Shares(rollout, reward, devices - rollout - reward)


def streaming_choices(mode: Mode) -> tuple[StreamingName, ...]:
    """Ways to stream that `mode` can gain from; first the one for its split of the paper.

    Where devices shift, that is late: the others only pay on fewer training devices.
    """
    if mode.is_synchronous:
        return ("off",)
    if mode.has_dedicated_training:
        return ("eager",)
    return ("late", "bursts", "eager") if mode.policy == "pivot" else ("late",)


class Choice(NamedTuple):
    """What is searched for."""

    shares: Shares
    streaming: StreamingName = "off"

    def on(self, options: Options) -> Options:
        """`options` with this way to stream."""
        return replace(options, streaming=STREAMING[self.streaming])


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What was run with its tokens/s, best first; the first few by the full run."""

    best: Choice
    tried: tuple[tuple[Choice, float], ...]
    num_feasible: int


class Trial(NamedTuple):
    """One split to run; plain data, so that it can be sent to another process."""

    scenario: Scenario
    mode: Mode
    shares: Shares
    seed: int
    options: Options


def speed_of(trial: Trial) -> float:
    """Tokens/s; 0 for shares that no run can use, or a run that stands still."""
    try:
        run = Simulation(trial.scenario, trial.mode, trial.shares, trial.seed, trial.options).run()
    except PivotError:
        return 0.0
    speed: float = describe(run)["throughput_tokens_per_s"]
    return speed


Speeds = Callable[[Sequence[Trial]], Sequence[float]]


def _in_turn(trials: Sequence[Trial]) -> list[float]:
    return [speed_of(trial) for trial in trials]


def best_split(
    scenario: Scenario,
    mode_name: str,
    seed: int,
    options: Options,
    *,
    streams: bool = False,
    num_full: int = 4,
    prune: bool = True,
    at_once: int = 1,
    speeds: Speeds = _in_turn,
) -> SearchResult:
    """The fastest split of `mode_name` on `seed`, with the best way to stream if it `streams`.

    `speeds` runs trials, `at_once` of them side by side. Where lengths do not drift, all are first tried on
    runs of a few steps; the best `num_full` of these are run in full.
    """
    mode = MODES[mode_name]
    work = scenario.workload
    is_drifting = work.response_drift.shape != "none" or work.verdict_drift.shape != "none"
    full = replace(options, timer=None)
    short = full if is_drifting else replace(full, num_steps=min(9, options.num_steps), warmup_steps=3)
    if short.num_steps <= short.warmup_steps:
        short = full
    ways = streaming_choices(mode) if streams else ("off",)
    bounds: dict[Choice, float] = {}
    for shares in feasible_splits(scenario, mode):
        bound = _bound_tokens_per_s(scenario, shares, seed, short)
        bounds |= {Choice(shares, way): bound for way in ways}
    left = sorted(bounds, key=lambda choice: (-bounds[choice], choice))
    tried: list[tuple[float, Choice]] = []

    def run(choices: Sequence[Choice], options: Options) -> list[tuple[float, Choice]]:
        trials = [Trial(scenario, mode, choice.shares, seed, choice.on(options)) for choice in choices]
        return list(zip(speeds(trials), choices, strict=True))

    while left:
        if prune and tried:
            left = [choice for choice in left if bounds[choice] > max(tried)[0]]
        now, left = left[:at_once], left[at_once:]
        tried += run(now, short)
    tried.sort(reverse=True)
    if short != full:
        first = [choice for _, choice in tried[:num_full]]
        tried = sorted(run(first, full), reverse=True) + tried[num_full:]
    return SearchResult(tried[0][1], tuple((choice, speed) for speed, choice in tried), len(bounds))


def _bound_tokens_per_s(scenario: Scenario, shares: Shares, seed: int, options: Options) -> float:
    """Tokens/s that the busiest role allows, and the whole cluster."""
    work = scenario.workload
    batches = [work.batch(seed, k, options.num_steps) for k in range(options.warmup_steps, options.num_steps)]
    samples = [sample for batch in batches for sample in batch]
    bound = fluid_bound(scenario, engine_models(scenario, samples), samples, len(batches))
    step_s = max(bound.step_time_s, bound.training_device_s / shares.training + scenario.training_fixed_s)
    for device_s, devices in (
        (bound.rollout_device_s, shares.rollout),
        (bound.reward_device_s, shares.reward),
    ):
        if devices:
            step_s = max(step_s, device_s / devices)
    tokens = sum(s.response + s.verdict for s in samples)
    return tokens / len(batches) / step_s
