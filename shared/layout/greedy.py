"""The greedy walk and the lower bound, on arrays (paper Appendix B.2).

The walk is sequential by nature: each choice depends on the loads that the earlier ones left. It is one
function of plain arithmetic; large plans run it compiled by numba, small ones (and machines without numba)
interpreted, with the same result to the last bit.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.layout.demands import DemandTable, Ints, rows_by_set

Floats = NDArray[np.float64]
_WORTH_COMPILING = 20_000
"""Demands from which loading compiled code (0.3 s, once a process) pays."""


@dataclass(frozen=True, eq=False)
class LinkTable:
    """Links of every (sender, receiver) of a `DemandTable`, each (senders, receivers)."""

    bandwidth_bytes_per_s: Floats
    overhead_s: Floats


@dataclass(frozen=True, eq=False)
class Choice:
    """`chosen` sender of every demand (demands,); loads (senders,); bytes (senders, receivers)."""

    chosen: NDArray[np.int32]
    load_s: Floats
    link_bytes: Ints


def _walk(
    class_of: Any,
    row_starts: Any,
    row_ends: Any,
    nbytes: Any,
    receiver: Any,
    senders_of: Any,
    set_starts: Any,
    set_ends: Any,
    members: Any,
    bandwidth: Any,
    overhead: Any,
    num_receivers: int,
    load_s: Any,
    link_bytes: Any,
    chosen: Any,
) -> None:
    """Each demand to the candidate with the least latency after taking it; ties to the first candidate."""
    at = 0
    for number in class_of:
        for row in range(row_starts[number], row_ends[number]):
            size, to, candidates = nbytes[row], receiver[row], senders_of[row]
            best = -1
            best_load = np.inf
            for i in range(set_starts[candidates], set_ends[candidates]):
                link = members[i] * num_receivers + to
                after = load_s[members[i]] + (size / bandwidth[link] + overhead[link])
                if after < best_load:
                    best = members[i]
                    best_load = after
            load_s[best] = best_load
            link_bytes[best * num_receivers + to] += size
            chosen[at] = best
            at += 1


@cache
def _compiled() -> Callable[..., None] | None:
    try:
        njit: Any = importlib.import_module("numba").njit  # 0.3 s: only where a plan is large
    except ImportError:
        return None
    try:
        compiled: Callable[..., None] = njit(cache=True)(_walk)
    except RuntimeError:  # no folder to keep the compiled code in
        compiled = njit(_walk)
    return compiled


def choose(table: DemandTable, links: LinkTable) -> Choice:
    """Walk all demands in order. O(demands × candidates)."""
    num_senders, num_receivers = len(table.senders), len(table.receivers)
    set_starts = np.concatenate([np.zeros(1, np.int64), table.set_ends[:-1]])
    assert (table.set_ends[table.senders_of] > set_starts[table.senders_of]).all(), "a slice without sender"
    inputs = (
        table.class_of,
        table.row_starts,
        table.row_ends,
        table.nbytes,
        table.receiver,
        table.senders_of,
        set_starts,
        table.set_ends,
        table.members,
        links.bandwidth_bytes_per_s.reshape(-1),
        links.overhead_s.reshape(-1),
    )
    outputs = (
        np.zeros(num_senders, np.float64),
        np.zeros(num_senders * num_receivers, np.int64),
        np.zeros(table.num_demands, np.int32),
    )
    walk = _compiled() if table.num_demands >= _WORTH_COMPILING else None
    if walk is not None:
        walk(*inputs, num_receivers, *outputs)
    else:  # lists: reading an element of an array costs an object
        load, sent, picked = (output.tolist() for output in outputs)
        interpreted: Callable[..., None] = _walk
        interpreted(*(column.tolist() for column in inputs), num_receivers, load, sent, picked)
        outputs = np.array(load, np.float64), np.array(sent, np.int64), np.array(picked, np.int32)
    load_s, link_bytes, chosen = outputs
    return Choice(chosen, load_s, link_bytes.reshape(num_senders, num_receivers))


def lower_bound_s(table: DemandTable, links: LinkTable) -> float:
    """No plan can be faster, in seconds. The largest of

    - the largest demand on its fastest link;
    - for every set of senders that some demand chooses from, the demands that can go nowhere else: their
      bytes over the bandwidth of the set (a sender counts with its fastest link), and their cheapest costs
      over the number of senders.
    """
    largest, sets = 0.0, table.sets
    work = np.zeros(len(sets), np.int64)
    cheapest_s = np.zeros(len(sets), np.float64)
    best = np.zeros(len(table.senders), np.float64)
    for number, (members, rows) in enumerate(zip(sets, rows_by_set(table), strict=True)):
        uses, to = table.row_uses[rows], table.receiver[rows]
        speed = links.bandwidth_bytes_per_s[np.ix_(members, to)]
        costs = (table.nbytes[rows] / speed + links.overhead_s[np.ix_(members, to)]).min(axis=0)
        work[number] = (table.nbytes[rows] * uses).sum()
        cheapest_s[number] = (costs * uses).sum()
        largest = max(largest, float(costs.max(initial=0.0)))
        best[members] = np.maximum(best[members], speed.max(axis=1, initial=0.0))
    has = np.zeros((len(sets), len(table.senders)), bool)
    for number, members in enumerate(sets):
        has[number, members] = True
    for number, members in enumerate(sets):
        captive = ~has[:, ~has[number]].any(axis=1)
        fluid = float(work[captive].sum()) / float(best[members].sum())
        largest = max(largest, fluid, float(cheapest_s[captive].sum()) / len(members))
    return largest
