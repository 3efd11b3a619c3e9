"""GPS's own layout: replicate first, shard under memory pressure (paper Appendix B.1).

Reads outnumber Writes and gate a shift, so every node keeps the whole model if it fits. If not, the nodes
form groups of k; a group shards the model over its members, and every group has a full copy. k is the
smallest that fits, so a bigger cluster adds groups instead of widening shards.

With 4 nodes, a 100 GiB model and 60 GiB per node: k = 2, groups (n0, n1) and (n2, n3), 50 GiB each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.layout.tensor_layout import Layout, Pattern, TensorSpec, index_specs, narrow, whole


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """A layout, its groups of nodes, and their nominal size k (a group has k or more members)."""

    layout: Layout
    groups: tuple[tuple[str, ...], ...]
    group_size: int


def form_groups(nodes: Sequence[str], group_size: int) -> tuple[tuple[str, ...], ...]:
    """len(nodes) // group_size groups of neighbours; a remainder is spread, so that no group is too small.

    >>> form_groups(["a", "b", "c", "d", "e"], 2)
    (('a', 'b', 'c'), ('d', 'e'))
    """
    num_groups = len(nodes) // group_size
    base, extra = divmod(len(nodes), num_groups)
    groups, at = [], 0
    for index in range(num_groups):
        size = base + (index < extra)
        groups.append(tuple(nodes[at : at + size]))
        at += size
    return tuple(groups)


def shard_over(spec: TensorSpec, turn: int, members: Sequence[str]) -> Pattern:
    """`spec` cut along its first dimension over `members`, as evenly as whole rows allow.

    The member that gets the longer pieces rotates with `turn`, the number of the tensor, so that remainders
    do not pile up.
    """
    if not spec.shape:
        return ((whole(spec), members[turn % len(members)]),)
    base, extra = divmod(spec.shape[0], len(members))
    parts, at = [], 0
    for step in range(len(members)):
        rows = base + (step < extra)
        if rows and spec.numel:
            parts.append((narrow(spec, 0, at, rows), members[(turn + step) % len(members)]))
        at += rows
    return tuple(parts)


def grouped_layout(
    specs: Sequence[TensorSpec], nodes: Sequence[str], node_budget_bytes: int
) -> GroupedLayout:
    """The layout with the smallest group size k whose largest share fits `node_budget_bytes`.

    Raises ValueError, naming the bytes, if the model does not fit over all nodes together.
    """
    tensors = index_specs(specs)
    largest = 0
    for group_size in range(1, len(nodes) + 1):
        groups = form_groups(nodes, group_size)
        layout = _sharded(specs, tensors, groups)
        largest = max((layout.nbytes_of(node) for node in nodes), default=0)
        if largest <= node_budget_bytes:
            return GroupedLayout(layout, groups, group_size)
    budget = f"the budget of {node_budget_bytes} bytes"
    raise ValueError(f"a share of {largest} bytes on each of {len(nodes)} nodes exceeds {budget}")


def _sharded(
    specs: Sequence[TensorSpec], tensors: Mapping[str, TensorSpec], groups: Sequence[Sequence[str]]
) -> Layout:
    """Every group has the whole model, sharded over its members."""
    known: dict[tuple[object, ...], Pattern] = {}
    patterns = {}
    for turn, spec in enumerate(specs):
        kind = (spec.shape, *(turn % len(group) for group in groups))
        if kind not in known:
            known[kind] = tuple(part for group in groups for part in shard_over(spec, turn, group))
        if known[kind]:
            patterns[spec.name] = known[kind]
    return Layout.of_patterns(tensors, patterns)
