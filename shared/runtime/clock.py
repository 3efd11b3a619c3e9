"""The only reader of the clock. Everything else gets `now_s` handed in."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds that only grow; comparable between processes of one machine since boot."""

    def unix_s(self) -> float:
        """Seconds since 1970, for people and files."""


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that tests move."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
