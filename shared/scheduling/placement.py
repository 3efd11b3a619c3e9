"""Placing and moving sequences among many replicas without looking at each replica for each sequence.

What replica i gains from a sequence that takes x seconds a step, (n + 1) / (base + x) − T, is convex in x. So
between two lengths it lies below the straight line through its values there, and so does the largest gain of
a block of replicas below the line through the block's largest values. Those are kept for a grid of lengths;
only blocks whose line reaches the best exact gain so far are looked at. The outcome is that of
`kernels.best` for each sequence, to the last bit: bounds only decide where to look, with a margin far above
what rounding can do.
"""

from typing import Any, NamedTuple

import numpy as np

from shared.scheduling.compiled import kernel
from shared.scheduling.kernels import (
    best,
    change,
    highest,
    is_sum_positive,
    meld,
    slowest,
    without_root,
)
from shared.scheduling.rows import BASE, OFFER, OPEN_T, N, T

_BLOCK = 16
"""Replicas bounded together."""
_POINTS = 16
"""Lengths of the grid: as many sequences lie between any two neighbours."""
_SAMPLE = 1024
"""Sequences that the grid is made from."""
_MARGIN = 1e-12
"""Of the highest throughput: some thousand times what rounding can do to a gain."""
_FEW = 128
"""Replicas up to which looking at each is as fast."""
_FEW_FOR_MOVES = 384
"""The same where two replicas change for each sequence."""


class Bounds(NamedTuple):
    """What is kept of replicas to bound their gains. Floats."""

    grid_s: Any
    """Seconds a step of the lengths of the grid, ascending; the first and the last are the extremes."""
    gains: Any
    """By replica and point of the grid."""
    tops: Any
    """The largest of each block, by point and block."""
    speeds: Any
    """The highest throughput of each block."""
    row: Any
    """Room to work in, a value for each point."""
    bounds: Any
    """Room to work in, a value for each block."""
    scale: Any
    """One value: no throughput was higher."""


@kernel
def _grid_of(attention: float, lengths: Any) -> Any:
    """The lengths between which to draw lines, of these and no others."""
    sample = np.sort(lengths[:: max(1, len(lengths) // _SAMPLE)])
    grid_s = np.empty(_POINTS)
    for k in range(_POINTS):
        grid_s[k] = attention * sample[(len(sample) - 1) * k // (_POINTS - 1)]
    grid_s[0], grid_s[-1] = attention * lengths.min(), attention * lengths.max()
    return grid_s


@kernel
def _update_gains(loads: Any, i: int, kept: Any) -> None:
    n, base, tokens_per_s = loads[N, i] + 1.0, loads[BASE, i], loads[T, i]
    for k in range(_POINTS):
        kept.gains[i, k] = n / (base + kept.grid_s[k]) - tokens_per_s
    kept.scale[0] = max(kept.scale[0], max(n / base, tokens_per_s))


@kernel
def _update_tops(loads: Any, block: int, kept: Any) -> None:
    gains, row = kept.gains, kept.row
    start = block * _BLOCK
    for k in range(_POINTS):
        row[k] = gains[start, k]
    speed = loads[T, start]
    for j in range(start + 1, min(start + _BLOCK, len(gains))):
        speed = max(speed, loads[T, j])
        for k in range(_POINTS):
            row[k] = gains[j, k] if gains[j, k] > row[k] else row[k]
    for k in range(_POINTS):
        kept.tops[k, block] = row[k]
    kept.speeds[block] = speed


@kernel
def _update(loads: Any, i: int, kept: Any) -> None:
    """Replica `i` has changed."""
    _update_gains(loads, i, kept)
    _update_tops(loads, i // _BLOCK, kept)


@kernel
def _bounds_of(loads: Any, grid_s: Any) -> Any:
    """Bounds of all replicas, all of them open."""
    size = loads.shape[1]
    num_blocks = (size + _BLOCK - 1) // _BLOCK
    kept = Bounds(
        grid_s,
        np.empty((size, _POINTS)),
        np.empty((_POINTS, num_blocks)),
        np.empty(num_blocks),
        np.empty(_POINTS),
        np.empty(num_blocks),
        np.zeros(1),
    )
    for i in range(size):
        _update_gains(loads, i, kept)
    for block in range(num_blocks):
        _update_tops(loads, block, kept)
    return kept


@kernel
def _no_bounds() -> Any:
    none = np.empty(0)
    return Bounds(none, np.empty((0, _POINTS)), np.empty((_POINTS, 0)), none, none, none, none)


@kernel
def _best_bounded(loads: Any, extra_s: float, need: int, kept: Any) -> int:
    """As `best`, for a length within the grid."""
    size, grid_s, bounds = loads.shape[1], kept.grid_s, kept.bounds
    cell = 0
    while cell < _POINTS - 2 and grid_s[cell + 1] < extra_s:
        cell += 1
    width_s = grid_s[cell + 1] - grid_s[cell]
    share = (extra_s - grid_s[cell]) / width_s if width_s > 0 else 0.0
    left, right = kept.tops[cell], kept.tops[cell + 1]
    for b in range(len(bounds)):
        bounds[b] = left[b] + share * (right[b] - left[b])
    n, base, tokens_per_s, offer = loads[N], loads[BASE], loads[T], loads[OFFER]
    most, first = -np.inf, -1
    start = b = highest(bounds)
    following = 0
    while True:
        for i in range(b * _BLOCK, min(b * _BLOCK + _BLOCK, size)):
            gain = (n[i] + 1.0) / (base[i] + extra_s) - tokens_per_s[i]
            if offer[i] >= need and (gain > most or (gain == most and i < first)):
                most, first = gain, i
        reach = most - _MARGIN * kept.scale[0]
        while following < len(bounds) and (following == start or bounds[following] < reach):
            following += 1
        if following == len(bounds):
            return first
        b = following
        following += 1


@kernel
def _fastest_bounded(loads: Any, kept: Any) -> int:
    """As `highest` of all throughputs."""
    i = highest(kept.speeds) * _BLOCK
    while loads[T, i] != kept.speeds[i // _BLOCK]:
        i += 1
    return i


@kernel
def place_all(
    loads: Any, steps: Any, attention: float, lengths: Any, needs: Any, waiting: Any, targets: Any
) -> int:
    """Place the sequences `waiting` in order until one fits nowhere, replicas into `targets`; how many were.

    All replicas in `loads` are open.
    """
    is_bounded = loads.shape[1] > _FEW and len(waiting) > 0
    kept = _bounds_of(loads, _grid_of(attention, lengths[waiting])) if is_bounded else _no_bounds()
    for k in range(len(waiting)):
        s = waiting[k]
        extra_s = attention * lengths[s]
        if is_bounded:
            target = _best_bounded(loads, extra_s, needs[s], kept)
        else:
            target = best(loads, extra_s, needs[s])
        if target < 0:
            return k
        change(loads, steps, attention, target, 1, lengths[s], needs[s])
        if is_bounded:
            _update(loads, target, kept)
        targets[k] = target
    return len(waiting)


@kernel
def moves(
    loads: Any,
    steps: Any,
    attention: float,
    lengths: Any,
    needs: Any,
    roots: Any,
    children: Any,
    siblings: Any,
    from_slowest: bool,
) -> Any:
    """Move shortest sequences while that pays; rows (sequence, source, target), int64.

    All replicas in `loads` are open.
    """
    made = np.empty((64, 3), np.int64)
    num = 0
    is_bounded = loads.shape[1] > _FEW_FOR_MOVES and len(lengths) > 0
    kept = _bounds_of(loads, _grid_of(attention, lengths)) if is_bounded else _no_bounds()
    while loads.shape[1] > 0:
        if from_slowest:
            source = slowest(loads)
        else:
            source = _fastest_bounded(loads, kept) if is_bounded else highest(loads[OPEN_T])
        s = roots[source]
        if s < 0:
            break
        length, need = lengths[s], needs[s]
        before = loads[T, source]
        change(loads, steps, attention, source, -1, -length, -need)
        if is_bounded:
            _update(loads, source, kept)
            target = _best_bounded(loads, attention * length, need, kept)
        else:
            target = best(loads, attention * length, need)
        if target < 0 or target == source:
            change(loads, steps, attention, source, 1, length, need)
            break
        target_before = loads[T, target]
        change(loads, steps, attention, target, 1, length, need)
        if not is_sum_positive(loads[T, source], loads[T, target], -before, -target_before):
            change(loads, steps, attention, target, -1, -length, -need)
            change(loads, steps, attention, source, 1, length, need)
            break
        if is_bounded:
            _update(loads, target, kept)
        roots[source] = without_root(lengths, children, siblings, s)
        roots[target] = meld(lengths, children, siblings, s, roots[target])
        if num == len(made):
            more = np.empty((2 * num, 3), np.int64)
            more[:num] = made
            made = more
        made[num, 0], made[num, 1], made[num, 2] = s, source, target
        num += 1
    return made[:num]
