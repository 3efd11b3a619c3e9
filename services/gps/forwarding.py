"""How the bytes of a Write reach every holder (paper §5.1). Pure.

A writer's bytes lie on its own node. Stage 0 brings them to the holders of a *home* group: the writer's own
if it is complete. In every later stage the groups that have them pass them on to as many that have not, so
that G groups take 1 + ceil(log2 G) stages, no byte enters a node twice, and within one stage no holder sends
a byte more than once. Groups that miss a member receive, but do not pass on.

Four groups of two, a writer on node 0::

    stage 0   0 → 0, 1            its own group
    stage 1   0 → 2, 1 → 3
    stage 2   0 → 4, 1 → 5,   2 → 6, 3 → 7
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.gps.packing import Packing
from shared.errors import Conflict
from shared.layout.regions import intersect, region_boxes
from shared.layout.tensor_layout import Box, Region

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """`receiver` gets `box` of `tensor` from `sender` in `stage`; in stage 0 out of the writers' staging."""

    stage: int
    sender: int
    receiver: int
    tensor: str
    box: Box


def passing_stages(
    groups: Sequence[Group], complete: set[Group], home: Group
) -> list[list[tuple[Group, Group]]]:
    """Per stage after 0, which group passes on to which. Complete groups first, for they multiply.

    >>> a, b, c, d = (0,), (1,), (2,), (3,)
    >>> passing_stages([a, b, c, d], {a, b, c, d}, a)
    [[((0,), (1,))], [((0,), (2,)), ((1,), (3,))]]
    """
    at = list(groups).index(home)
    ring = [*groups[at + 1 :], *groups[:at]]
    waiting = [g for g in ring if g in complete] + [g for g in ring if g not in complete]
    have, stages = [home], []
    while waiting:
        targets, waiting = waiting[: len(have)], waiting[len(have) :]
        stages.append(list(zip(have, targets, strict=False)))
        have += [group for group in targets if group in complete]
    return stages


def home_group(groups: Sequence[Group], complete: set[Group], node: int) -> Group:
    """The group of `node` if it is complete, else the first complete one. Raises Conflict if none is."""
    own = next((group for group in groups if node in group), None)
    if own in complete:
        assert own is not None
        return own
    found = next((group for group in groups if group in complete), None)
    if found is None:
        raise Conflict(
            "no replication group is complete: a Write would be whole nowhere. "
            "Start the missing nodes, then Write again",
            field="model",
            remedy="start the missing nodes",
        )
    return found


def forward(
    packings: Mapping[int, Packing],
    groups: Sequence[Group],
    written: Iterable[tuple[int, str, Region]],
) -> list[Hop]:
    """Every hop of a Write, by stage.

    Args:
        packings: what each *serving* node holds.
        groups: all groups of the view; a member without a packing is missing.
        written: (node of the writer, tensor, region): every element of the model exactly once.

    Raises Conflict if no group is complete.
    """
    complete = {group for group in groups if all(node in packings for node in group)}
    hops: list[Hop] = []
    by_home: dict[Group, list[tuple[int, str, Box]]] = {}
    specs = next(iter(packings.values())).specs if packings else {}
    for node, tensor, region in written:
        home = home_group(groups, complete, node)
        boxes = region_boxes(specs[tensor].shape, region)
        by_home.setdefault(home, []).extend((node, tensor, box) for box in boxes)
    for home, parts in by_home.items():
        boxes_of = [(tensor, box) for _, tensor, box in parts]
        hops += [
            Hop(0, node, receiver, tensor, common)
            for receiver in home
            for node, tensor, box in parts
            if (common := packings[receiver].common(tensor, box)) is not None
        ]
        for stage, passes in enumerate(passing_stages(groups, complete, home), start=1):
            for source, target in passes:
                for receiver in target:
                    if receiver in packings:
                        hops += _pass_on(stage, source, receiver, boxes_of, packings)
    return sorted(hops, key=lambda hop: hop.stage)


def _pass_on(
    stage: int,
    source: Group,
    receiver: int,
    boxes: Sequence[tuple[str, Box]],
    packings: Mapping[int, Packing],
) -> Iterable[Hop]:
    for tensor, box in boxes:
        wanted = packings[receiver].common(tensor, box)
        if wanted is None:
            continue
        for sender in source:
            held = packings[sender].boxes.get(tensor)
            if held is not None and (common := intersect(held, wanted)) is not None:
                yield Hop(stage, sender, receiver, tensor, common)
