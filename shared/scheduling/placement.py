"""Placing many sequences on many replicas without looking at each replica for each sequence.

What replica i gains from a sequence that takes x seconds a step, (n + 1) / (base + x) − T, is convex in x. So
between two lengths it lies below the straight line through its values there, and so does the largest gain of
a block of replicas below the line through the block's largest values. Those are kept for a grid of lengths;
only blocks whose line reaches the best exact gain so far are looked at. The outcome is that of
`kernels.best` for each sequence, to the last bit: bounds only decide where to look, with a margin far above
what rounding can do.
"""

from typing import Any

import numpy as np

from shared.scheduling.kernels import best, change, highest, kernel
from shared.scheduling.rows import BASE, OFFER, N, T

_BLOCK = 16
"""Replicas bounded together."""
_POINTS = 16
"""Lengths of the grid: as many sequences lie between any two neighbours."""
_MARGIN = 1e-12
"""Of the highest throughput: some thousand times what rounding can do to a gain."""
_FEW = 64
"""Replicas up to which looking at each is as fast."""


@kernel
def _gains_of(loads: Any, i: int, grid_s: Any, gains: Any) -> float:
    """Bring the grid up to date with replica `i`; returns its scale, for the margin."""
    n, base, tokens_per_s = loads[N, i] + 1.0, loads[BASE, i], loads[T, i]
    for k in range(_POINTS):
        gains[i, k] = n / (base + grid_s[k]) - tokens_per_s
    scale: float = max(n / base, tokens_per_s)
    return scale


@kernel
def _top_of(block: int, gains: Any, row: Any, tops: Any) -> None:
    """The largest gains of a block; `row` is room to work in."""
    start = block * _BLOCK
    for k in range(_POINTS):
        row[k] = gains[start, k]
    for j in range(start + 1, min(start + _BLOCK, len(gains))):
        for k in range(_POINTS):
            row[k] = gains[j, k] if gains[j, k] > row[k] else row[k]
    for k in range(_POINTS):
        tops[k, block] = row[k]


@kernel
def _place_bounded(
    loads: Any, steps: Any, attention: float, lengths: Any, needs: Any, waiting: Any, targets: Any
) -> int:
    size = loads.shape[1]
    num_blocks = (size + _BLOCK - 1) // _BLOCK
    ascending = np.sort(lengths[waiting])
    grid_s = np.empty(_POINTS)
    for k in range(_POINTS):
        grid_s[k] = attention * ascending[(len(ascending) - 1) * k // (_POINTS - 1)]
    gains, row = np.empty((size, _POINTS)), np.empty(_POINTS)
    tops = np.empty((_POINTS, num_blocks))
    bounds = np.empty(num_blocks)
    scale = 0.0
    for i in range(size):
        scale = max(scale, _gains_of(loads, i, grid_s, gains))
    for block in range(num_blocks):
        _top_of(block, gains, row, tops)
    n, base, tokens_per_s, offer = loads[N], loads[BASE], loads[T], loads[OFFER]
    for k in range(len(waiting)):
        s = waiting[k]
        need = needs[s]
        extra_s = attention * lengths[s]
        cell = 0
        while cell < _POINTS - 2 and grid_s[cell + 1] < extra_s:
            cell += 1
        width_s = grid_s[cell + 1] - grid_s[cell]
        share = (extra_s - grid_s[cell]) / width_s if width_s > 0 else 0.0
        left, right = tops[cell], tops[cell + 1]
        for b in range(num_blocks):
            bounds[b] = left[b] + share * (right[b] - left[b])
        most, first = -np.inf, -1
        b = highest(bounds)
        start_at, b_next = b, 0
        while True:
            for i in range(b * _BLOCK, min(b * _BLOCK + _BLOCK, size)):
                gain = (n[i] + 1.0) / (base[i] + extra_s) - tokens_per_s[i]
                if offer[i] >= need and (gain > most or (gain == most and i < first)):
                    most, first = gain, i
            reach = most - _MARGIN * scale
            while b_next < num_blocks and (b_next == start_at or bounds[b_next] < reach):
                b_next += 1
            if b_next == num_blocks:
                break
            b = b_next
            b_next += 1
        if first < 0:
            return k
        change(loads, steps, attention, first, 1, lengths[s], need)
        scale = max(scale, _gains_of(loads, first, grid_s, gains))
        _top_of(first // _BLOCK, gains, row, tops)
        targets[k] = first
    return len(waiting)


@kernel
def place_all(
    loads: Any, steps: Any, attention: float, lengths: Any, needs: Any, waiting: Any, targets: Any
) -> int:
    """Place the sequences `waiting` in order until one fits nowhere, replicas into `targets`; how many were.

    All replicas in `loads` are open.
    """
    if loads.shape[1] > _FEW and len(waiting) > 0:
        return _place_bounded(loads, steps, attention, lengths, needs, waiting, targets)
    for k in range(len(waiting)):
        s = waiting[k]
        target = best(loads, attention * lengths[s], needs[s])
        if target < 0:
            return k
        change(loads, steps, attention, target, 1, lengths[s], needs[s])
        targets[k] = target
    return len(waiting)
