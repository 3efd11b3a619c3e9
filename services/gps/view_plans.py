"""Transfer plans over the view: the serving nodes' shards against what one receiver lacks, cached per epoch
(paper Appendix B.2)."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.gps.membership import serving
from services.gps.packing import Packing
from services.gps.peers import Cluster
from shared.contracts.gps_cluster import ClusterView
from shared.errors import Conflict, LayoutError
from shared.layout.demands import demands_of
from shared.layout.refine import refine
from shared.layout.regions import region_boxes, subtract
from shared.layout.tensor_layout import Box, Layout, Placement, Region
from shared.layout.transfer_plan import Link, PlanCache, PlanKey, TransferPlan, plan_transfers

Slices = tuple[tuple[str, Box], ...]


def node_name(node: int) -> str:
    return f"node-{node}"


@dataclass(slots=True)
class ViewPlans:
    """Plans for receivers on the node of `cluster`. `link` is profiled between any two nodes."""

    cluster: Cluster
    link: Link
    cache: PlanCache = field(default_factory=PlanCache)

    @property
    def layout_epoch(self) -> int:
        return self.cluster.view.epoch

    def moved(self, old: ClusterView, new: ClusterView) -> None:
        """Forget the plans that a node takes part in which came or went, and those of other groups."""
        if old.groups != new.groups:
            self.cache.invalidate()
        for node in set(serving(old)) ^ set(serving(new)):
            self.cache.invalidate(holder=node_name(node))

    async def for_boxes(
        self, model: str, receiver: str, boxes: Slices, excluded: frozenset[int] = frozenset()
    ) -> TransferPlan:
        """Who sends which of `boxes` to `receiver`; `excluded` nodes just failed.

        Raises Conflict if nobody else serves a part of them.
        """
        senders = [node for node in self.cluster.others() if node not in excluded]
        digest = hashlib.blake2b(repr((boxes, sorted(excluded))).encode(), digest_size=8).hexdigest()
        key = PlanKey("read", model, self.layout_epoch, (receiver,), digest)
        if found := self.cache.get(key):
            return found
        specs = self.cluster.specs[model]
        packings = {node: self.cluster.packing(model, node) for node in senders}

        def make() -> tuple[TransferPlan, Layout, Layout]:
            held = [
                Placement(tensor, box, node_name(node))
                for node, packing in packings.items()
                for tensor, box in packing.boxes.items()
            ]
            source = Layout(specs, held)
            target = Layout(specs, [Placement(tensor, box, receiver) for tensor, box in boxes])
            demands = demands_of(refine(source, target))
            return plan_transfers(demands, lambda _s, _r: self.link, key.plan_id), source, target

        try:
            made = await asyncio.to_thread(make)
        except LayoutError as error:
            remedy = "start the nodes that are away, or read again when they have joined"
            raise Conflict(
                f"no other serving node holds all that {receiver} lacks of {model} ({error.message}). "
                f"{remedy}",
                model=model,
                field="model",
                remedy=remedy,
            ) from error
        self.cache.put(key, *made)
        return made[0]


def split_by_place(
    packing: Packing, parts: Iterable[tuple[str, Region]]
) -> tuple[list[tuple[str, Box]], list[tuple[str, Box]]]:
    """`parts` as boxes: those that are here, and those that are elsewhere."""
    here: list[tuple[str, Box]] = []
    away: list[tuple[str, Box]] = []
    for tensor, region in parts:
        for box in region_boxes(packing.specs[tensor].shape, region):
            common = packing.common(tensor, box)
            if common is None:
                away.append((tensor, box))
                continue
            here.append((tensor, common))
            away += [(tensor, rest) for rest in subtract(box, common)]
    return here, away


def by_sender(plan: TransferPlan) -> dict[int, list[tuple[str, Box]]]:
    """Sending node → its slices, in plan order."""
    found: dict[int, list[tuple[str, Box]]] = {}
    for transfer in plan.transfers:
        node = int(transfer.sender.removeprefix("node-"))
        found.setdefault(node, []).append((transfer.piece.tensor, transfer.piece.box))
    return found


def without_repeats(boxes: Sequence[tuple[str, Box]]) -> Slices:
    """Each box once: receivers may ask for one twice."""
    return tuple(dict.fromkeys(boxes))
