"""The best fixed split of a scenario, by search over all feasible ones: the opponent that counts.

All splits are simulated on one seed with few steps; the best few again on the full run. Training's share is
searched too. For scenarios that drift, every split is run over the whole drift.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shared.errors import PivotError
from shared.sim.driver import Options, Simulation
from shared.sim.modes import MODES, Mode
from shared.sim.report import describe
from shared.sim.scenarios import Scenario, Shares

_STEPS_A_SIDE = 16


def feasible_splits(scenario: Scenario, mode: Mode) -> Iterator[Shares]:
    """Splits in whole replicas of both models; each share in steps of at least a 16th of the devices."""
    devices = scenario.num_devices
    coarsest = max(1, devices // _STEPS_A_SIDE)
    unit_rollout = max(scenario.policy_tp, coarsest)
    unit_reward = max(scenario.genrm_tp, coarsest)
    if mode.name != "disaggregated":
        unit = max(scenario.policy_tp, scenario.genrm_tp, devices // 8)
        most = devices if mode.policy == "pivot" else devices - unit
        yield from (Shares(0, 0, training) for training in range(unit, most + 1, unit))
        return
    for reward in range(unit_reward, devices, unit_reward):
        for rollout in range(unit_rollout, devices - reward, unit_rollout):
            yield Shares(rollout, reward, devices - rollout - reward)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every split with its tokens/s, best first; the first few by the full run."""

    best: Shares
    tried: tuple[tuple[Shares, float], ...]
    num_full: int


def best_split(
    scenario: Scenario,
    mode_name: str,
    seed: int,
    options: Options,
    *,
    num_full: int = 4,
    on_tried: Callable[[], None] | None = None,
) -> SearchResult:
    """The fastest split of `mode_name` on `seed`. Splits whose run stands still are left out."""
    mode = MODES[mode_name]
    is_drifting = (
        scenario.workload.response_drift.shape != "none" or scenario.workload.verdict_drift.shape != "none"
    )
    short = options if is_drifting else replace(options, num_steps=min(5, options.num_steps), warmup_steps=2)
    short = replace(short, timer=None, on_step=None)

    def speed(shares: Shares, how: Options) -> float:
        try:
            row = describe(Simulation(scenario, mode, shares, seed, how).run())
        except PivotError:  # shares no run can use, or one that stands still
            return 0.0
        finally:
            if on_tried:
                on_tried()
        result: float = row["throughput_tokens_per_s"]
        return result

    first = sorted(((speed(s, short), s) for s in feasible_splits(scenario, mode)), reverse=True)
    if is_drifting:
        return SearchResult(first[0][1], tuple((s, v) for v, s in first), len(first))
    full = replace(options, timer=None, on_step=None)
    again = sorted(((speed(s, full), s) for _, s in first[:num_full]), reverse=True)
    ordered = again + first[num_full:]
    return SearchResult(ordered[0][1], tuple((s, v) for v, s in ordered), num_full)
