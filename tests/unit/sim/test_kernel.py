"""Events happen in the order of time, priority, insertion."""

import pytest

from shared.errors import InvalidRequest
from shared.sim.kernel import DECIDE, STATE, EventQueue


def test_equal_times_are_ordered_by_priority_then_insertion():
    queue, done = EventQueue(), []
    queue.at(2.0, lambda: done.append("late"))
    queue.at(1.0, lambda: done.append("decide"), DECIDE)
    queue.at(1.0, lambda: done.append("first"), STATE)
    queue.at(1.0, lambda: done.append("second"), STATE)
    while queue.advance():
        pass
    assert done == ["first", "second", "decide", "late"]
    assert queue.now_s == 2.0


def test_the_past_is_closed():
    queue = EventQueue()
    queue.at(3.0, lambda: None)
    queue.advance()
    with pytest.raises(InvalidRequest):
        queue.at(2.0, lambda: None)
