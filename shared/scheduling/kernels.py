"""The inner loops of dispatch and migration, compiled at first use.

Only `shared.scheduling` calls these. A role's replicas are the columns of one float64 matrix `loads` (counts
and tokens are exact in it, far below 2^53); its rows are named in `shared.scheduling.rows`. Sequences are
numbered by their place in dispatch order; `lengths` and `needs` are int64 vectors over them. `steps` is the
table of a step of n sequences (rows in `shared.scheduling.rows`); it must reach one beyond the most that any
replica can get.

    T(n, tok) = n / (A·tok + steps[OVERHEAD, n])          A is `attention`, seconds per token

Arithmetic is IEEE, in a fixed order: the flags below only rule out NaN and the sign of zero, so that a
maximum can be found with vectors. So results equal those of a plain loop in Python, bit for bit.

The sequences of a replica are a pairing heap by (length, number): `roots` over replicas, `children` and
`siblings` over sequences, -1 for none.
"""

from typing import Any

import numpy as np

from shared.scheduling.compiled import kernel
from shared.scheduling.rows import (
    BASE,
    GAIN,
    MOST_ATTENTION,
    OFFER,
    OPEN_T,
    OVERHEAD,
    ROOM,
    THRESHOLD,
    TOK,
    N,
    T,
)


@kernel
def change(
    loads: Any, steps: Any, attention: float, i: int, num_sequences: int, tokens: int, need: int
) -> None:
    """Add (or with negative numbers take away) sequences of replica `i` with their tokens and KV need."""
    n = loads[N, i] + num_sequences
    tok = loads[TOK, i] + tokens
    attention_s = attention * tok
    tokens_per_s = n / (attention_s + steps[OVERHEAD, int(n)]) if n > 0 else 0.0
    loads[N, i], loads[TOK, i], loads[T, i] = n, tok, tokens_per_s
    loads[ROOM, i] -= need
    loads[OFFER, i] = loads[ROOM, i] if attention_s <= steps[MOST_ATTENTION, int(n)] else -np.inf
    loads[BASE, i] = attention_s + steps[OVERHEAD, int(n) + 1]
    if loads[OPEN_T, i] >= 0:
        loads[THRESHOLD, i] = loads[OPEN_T, i] = tokens_per_s


@kernel
def highest(values: Any) -> int:
    """Index of the first of the highest values; -1 if all are -inf. Several maxima at once hide latency."""
    a = b = c = d = e = f = g = h = -np.inf
    full = len(values) // 8 * 8
    for i in range(0, full, 8):
        a, b = max(a, values[i]), max(b, values[i + 1])
        c, d = max(c, values[i + 2]), max(d, values[i + 3])
        e, f = max(e, values[i + 4]), max(f, values[i + 5])
        g, h = max(g, values[i + 6]), max(h, values[i + 7])
    most = max(max(max(a, b), max(c, d)), max(max(e, f), max(g, h)))
    for i in range(full, len(values)):
        most = max(most, values[i])
    if most == -np.inf:
        return -1
    first = 0
    while values[first] != most:
        first += 1
    return first


@kernel
def best(loads: Any, extra_s: float, need: int) -> int:
    """The first of the replicas with room that gain most from a sequence taking `extra_s` a step; or -1."""
    n, base, threshold, offer, gain = loads[N], loads[BASE], loads[THRESHOLD], loads[OFFER], loads[GAIN]
    for i in range(len(n)):
        more = (n[i] + 1.0) / (base[i] + extra_s) - threshold[i]
        gain[i] = more if offer[i] >= need else -np.inf
    return highest(gain)


@kernel
def place(loads: Any, steps: Any, attention: float, length: int, need: int) -> int:
    """Put a sequence where it gains most; that replica, or -1 if it fits nowhere."""
    target = best(loads, attention * length, need)
    if target >= 0:
        change(loads, steps, attention, target, 1, length, need)
    return target


@kernel
def add_all(loads: Any, steps: Any, attention: float, lengths: Any, needs: Any, homes: Any) -> None:
    """Add every sequence to its home, where it has one."""
    for s in range(len(homes)):
        if homes[s] >= 0:
            change(loads, steps, attention, homes[s], 1, lengths[s], needs[s])


@kernel
def take_off(
    loads: Any, steps: Any, attention: float, lengths: Any, needs: Any, homes: Any, gone: Any
) -> None:
    """Take the sequences `gone` off their homes."""
    for k in range(len(gone)):
        s = gone[k]
        change(loads, steps, attention, homes[s], -1, -lengths[s], -needs[s])


@kernel
def slowest(loads: Any) -> int:
    """The first of the open replicas whose sequences advance most slowly."""
    first, longest = 0, 0.0
    for i in range(loads.shape[1]):
        if loads[N, i] > 0 and loads[OPEN_T, i] >= 0:
            step_s = loads[N, i] / loads[T, i]
            if step_s > longest:
                first, longest = i, step_s
    return first


@kernel
def _two_sum(a: float, b: float) -> tuple[float, float]:
    """a + b rounded, and what rounding lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@kernel
def is_sum_positive(a: float, b: float, c: float, d: float) -> bool:
    """Whether the exact sum of four numbers is above zero (Shewchuk's expansions, as `math.fsum`)."""
    s1, e1 = _two_sum(a, b)
    q, e2 = _two_sum(c, e1)
    s2, e3 = _two_sum(q, s1)
    q, e4 = _two_sum(d, e2)
    q, e5 = _two_sum(q, e3)
    q, e6 = _two_sum(q, s2)
    for part in (q, e6, e5, e4):
        if part != 0.0:
            return part > 0.0
    return False


@kernel
def meld(lengths: Any, children: Any, siblings: Any, a: int, b: int) -> int:
    """The heap of both heaps; either may be -1."""
    if a < 0 or b < 0:
        return max(a, b)
    if lengths[b] < lengths[a] or (lengths[b] == lengths[a] and b < a):
        a, b = b, a
    siblings[b] = children[a]
    children[a] = b
    return a


@kernel
def without_root(lengths: Any, children: Any, siblings: Any, root: int) -> int:
    """The heap of all below `root`: melded in pairs from the left, the pairs from the right."""
    pairs, child = -1, children[root]
    children[root] = -1
    while child >= 0:
        second = siblings[child]
        siblings[child] = -1
        rest = -1
        if second >= 0:
            rest = siblings[second]
            siblings[second] = -1
        merged = meld(lengths, children, siblings, child, second)
        siblings[merged] = pairs  # a stack of melded pairs, until the second pass
        pairs, child = merged, rest
    heap = -1
    while pairs >= 0:
        rest = siblings[pairs]
        siblings[pairs] = -1
        heap = meld(lengths, children, siblings, heap, pairs)
        pairs = rest
    return heap


@kernel
def build_heaps(lengths: Any, homes: Any, roots: Any, children: Any, siblings: Any) -> None:
    """A heap for each replica of the sequences at home there; all vectors come filled with -1."""
    for s in range(len(homes) - 1, -1, -1):
        if homes[s] >= 0:
            roots[homes[s]] = meld(lengths, children, siblings, s, roots[homes[s]])


@kernel
def push_all(lengths: Any, roots: Any, children: Any, siblings: Any, sequences: Any, targets: Any) -> None:
    """Add each of `sequences` to the heap of its target."""
    for k in range(len(sequences)):
        roots[targets[k]] = meld(lengths, children, siblings, sequences[k], roots[targets[k]])
