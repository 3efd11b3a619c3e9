"""Discrete events: whatever is due next happens next.

Order is (time, priority, insertion), so equal times never depend on anything but the program itself.
"""

import heapq
from collections.abc import Callable

from shared.errors import InvalidRequest

Action = Callable[[], None]

STATE, REPORT, DECIDE = 0, 1, 2
"""Priorities at one instant: engines and shifts change first, then reports, then decisions."""


class EventQueue:
    """The clock of a simulation and what is still to happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Action]] = []
        self._num_scheduled = 0
        self.num_done = 0

    def at(self, time_s: float, action: Action, priority: int = STATE) -> None:
        """Do `action` at `time_s`, which must not be past."""
        if time_s < self.now_s:
            raise InvalidRequest("time_s", f"{time_s} is before now, {self.now_s}")
        heapq.heappush(self._heap, (time_s, priority, self._num_scheduled, action))
        self._num_scheduled += 1

    def after(self, seconds: float, action: Action, priority: int = STATE) -> None:
        """Do `action` in `seconds`."""
        self.at(self.now_s + seconds, action, priority)

    def advance(self) -> bool:
        """Do the next thing; False when nothing is left."""
        if not self._heap:
            return False
        self.now_s, _, _, action = heapq.heappop(self._heap)
        self.num_done += 1
        action()
        return True
