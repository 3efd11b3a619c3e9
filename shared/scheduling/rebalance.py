"""Which running sequences a shift-up should move (paper §6.2), decided without touching any of them."""

from collections.abc import Iterable

import numpy as np

from shared.scheduling.config import SchedulerConfig
from shared.scheduling.migration import (
    ELSEWHERE,
    Heaps,
    Movable,
    ReplicaLoads,
    Sequences,
    dispatch,
    moves_worth_making,
)
from shared.scheduling.sequence import Phase, SequenceState


def sequences_to_move(
    loads: ReplicaLoads,
    on_replicas: Iterable[SequenceState],
    config: SchedulerConfig,
    *,
    from_slowest: bool = False,
) -> list[SequenceState]:
    """Sequences that run better on another replica, in order of decision.

    Decided on a copy of `loads` in which the aborts already under way have landed on their best replica. A
    sequence that is moved twice and ends where it is, is not moved at all.
    """
    loads = loads.copy()
    states = sorted(on_replicas, key=lambda state: (config.priority(state), state.id))
    homes: list[int] = []
    landing: list[Movable] = []
    for state in states:
        assert state.place.replica is not None
        at = loads.index[state.place.replica]
        if state.place.phase is Phase.RUNNING:
            homes.append(at)
            continue
        homes.append(ELSEWHERE)
        movable = Movable(state.length, state.kv_need(config.growth_margin_tokens))
        loads.change(at, -1, -movable.length, -movable.need)
        if not state.is_cancelled:
            landing.append(movable)
    if len(dispatch(loads, landing)) < len(landing):
        return []
    sequences = Sequences(
        np.array([state.length for state in states], np.int64),
        np.array([state.kv_need(config.growth_margin_tokens) for state in states], np.int64),
        np.array(homes, np.int64),
    )
    heaps = Heaps.of(sequences, len(loads.ids))
    moves = moves_worth_making(loads, sequences, heaps, from_slowest=from_slowest).tolist()
    ends_on = {number: target for number, _, target in moves}
    return [states[number] for number, at in ends_on.items() if loads.ids[at] != states[number].place.replica]
