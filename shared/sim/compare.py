"""Many runs side by side: scenarios, modes, splits and seeds, each run in a process of its own."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from shared.sim.driver import Simulation
from shared.sim.modes import MODES, paper_shares
from shared.sim.report import describe
from shared.sim.run import Options
from shared.sim.scenarios import Scenario
from shared.sim.search import Choice, Trial, best_split, speed_of, streaming_choices

if TYPE_CHECKING:
    from concurrent.futures import Executor

SEARCHED = ("disaggregated", "disaggregated_best", "rollout_reward_colocated", "pivot_best")
"""Modes whose best split is searched."""
OnPhase = Callable[[str, int, int], None]


def _pool(jobs: int) -> "Executor":
    """Imported when needed: the simulator itself needs no processes."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    return ProcessPoolExecutor(jobs, get_context("spawn"))


class Runner:
    """Runs simulations, several at once in processes of their own where `jobs` allows."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._pool = _pool(jobs) if jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def speeds(self, trials: Sequence[Trial]) -> list[float]:
        """Tokens/s of each."""
        return list(self._pool.map(speed_of, trials) if self._pool else map(speed_of, trials))

    def rows(self, trials: Sequence[tuple[Trial, str]]) -> Iterator[dict[str, Any]]:
        """The row of each run and its split's name, in order."""
        return self._pool.map(described, trials) if self._pool else map(described, trials)


def described(named: tuple[Trial, str]) -> dict[str, Any]:
    """A run's row, with the CPU seconds it took if the options have a timer."""
    trial, split = named
    timer = trial.options.timer
    before = timer() if timer else 0.0
    row = describe(Simulation(*trial).run(), split)
    spent = round(timer() - before, 2) if timer else None
    return row | {"planner_ms": row.get("planner_ms"), "cpu_s": spent}


def run_all(
    scenarios: list[Scenario],
    modes: list[str],
    seeds: int,
    options: Options,
    *,
    best: bool,
    streams: bool = False,
    jobs: int = 1,
    on_phase: OnPhase = lambda phase, done, total: None,
) -> Iterator[dict[str, Any]]:
    """Rows of each scenario and mode with the paper's split, then the best one, over all seeds.

    `streams`: training begins with a part of a batch, in the way that suits the mode.
    `on_phase(phase, done, total)` hears how far it is.
    """
    with Runner(jobs) as runner:
        trials: list[tuple[Trial, str]] = []
        done, total = 0, len(scenarios) * len(modes)
        for scenario in scenarios:
            for name in modes:
                mode = MODES[name]
                way = streaming_choices(mode)[0] if streams else "off"
                splits = {"paper" if name != "colocated" else "-": Choice(paper_shares(scenario, mode), way)}
                if best and name in SEARCHED:
                    found = best_split(
                        scenario, name, 0, options, streams=streams, at_once=jobs, speeds=runner.speeds
                    )
                    splits["best"] = found.best
                for split, choice in splits.items():
                    trials += (
                        (Trial(scenario, mode, choice.shares, seed, choice.on(options)), split)
                        for seed in range(seeds)
                    )
                done += 1
                on_phase("search of splits", done, total)
        for done, row in enumerate(runner.rows(trials), start=1):
            on_phase("runs", done, len(trials))
            yield row
