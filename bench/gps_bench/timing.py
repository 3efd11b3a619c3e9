"""Times of things done side by side, on a machine that is not idle."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of each thing in each round."""

    rounds: Mapping[str, list[float]]

    def median_s(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def ratio(self, limit: str, name: str) -> float:
        """Speed of `name` over the speed of `limit`: the median of the rounds' ratios."""
        pairs = zip(self.rounds[limit], self.rounds[name], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    def gb_per_s(self, nbytes: int, name: str) -> float:
        return round(nbytes / self.median_s(name) / 1e9, 3)


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int) -> Times:
    """Do each of `work` once a round, so that a busy moment hits all alike.

    One round before the first is not counted.
    """
    rounds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, do in work.items():
            begin = time.perf_counter()
            do()
            if turn:
                rounds[name].append(time.perf_counter() - begin)
    return Times(rounds)
