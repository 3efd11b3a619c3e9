"""Which running sequences a shift-up should move (paper §6.2), decided without touching any of them."""

from collections.abc import Iterable

from shared.scheduling.config import SchedulerConfig
from shared.scheduling.migration import Movable, ReplicaLoads, dispatch, moves_worth_making
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
    running: list[list[Movable]] = [[] for _ in loads.ids]
    landing: list[Movable] = []
    for rank, state in enumerate(states):
        assert state.place.replica is not None
        movable = Movable(state.length, rank, state.kv_need(config.growth_margin_tokens))
        at = loads.index[state.place.replica]
        if state.place.phase is Phase.RUNNING:
            running[at].append(movable)
            continue
        loads.change(at, -1, -movable.length, -movable.need)
        if not state.is_cancelled:
            landing.append(movable)
    if len(dispatch(loads, landing)) < len(landing):
        return []
    for movables in running:
        movables.sort()
    moves = moves_worth_making(loads, running, from_slowest=from_slowest)
    ends_on = {move.movable.rank: move.target for move in moves}
    return [states[rank] for rank, at in ends_on.items() if loads.ids[at] != states[rank].place.replica]
