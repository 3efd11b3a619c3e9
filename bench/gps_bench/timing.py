"""Times of things done side by side, on a machine that is not idle."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in rounds: every round does each once, so that a busy moment hits all alike.

    One round before the first is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, do in work.items():
            begin = time.perf_counter()
            do()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def gb_per_s(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 3)
