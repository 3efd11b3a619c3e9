"""Transfer plans of Reads: GPS's own layout over the nodes against a receiver's, cached (paper Appendix
B.2)."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

from services.gps.boxes import Part
from shared.layout.demands import demands_of
from shared.layout.refine import refine
from shared.layout.replication import grouped_layout
from shared.layout.tensor_layout import Layout, Placement, TensorSpec, full_layout
from shared.layout.transfer_plan import LinkOf, PlanCache, PlanKey, TransferPlan, plan_transfers

_MAX_DIGESTS = 256


class Plans:
    """Plans over `nodes`, each with `node_budget_bytes` for one copy of a model, and links as profiled."""

    def __init__(
        self, nodes: Sequence[str], node_budget_bytes: int, link_of: LinkOf, cache: PlanCache | None = None
    ) -> None:
        self._nodes, self._budget, self._link_of = tuple(nodes), node_budget_bytes, link_of
        self._layouts: dict[str, Layout] = {}
        self._digests: dict[tuple[Part, ...], str] = {}
        self.cache = cache or PlanCache()
        self.layout_epoch = 0

    def store_layout(self, model: str, specs: Mapping[str, TensorSpec]) -> Layout:
        """Where GPS keeps `model`: whole on every node if that fits, else sharded inside groups."""
        if model not in self._layouts:
            self._layouts[model] = grouped_layout(list(specs.values()), self._nodes, self._budget).layout
        return self._layouts[model]

    def set_nodes(self, nodes: Sequence[str]) -> None:
        """Nodes came or went: a new layout epoch; plans that a changed node took part in are forgotten."""
        changed = set(self._nodes) ^ set(nodes)
        if not changed:
            return
        self._nodes, self._layouts = tuple(nodes), {}
        self.layout_epoch += 1
        for node in changed:
            self.cache.invalidate(holder=node)

    async def for_read(
        self, model: str, specs: Mapping[str, TensorSpec], receiver: str, parts: Sequence[Part]
    ) -> TransferPlan:
        """Who sends what to `receiver`; no `parts` means the whole model. Raises LayoutError.

        A new plan of a big mixture-of-experts model takes a second: it is made in a thread, and kept.
        """
        key = PlanKey("read", model, self.layout_epoch, (receiver,), self._digest(tuple(parts)))
        if found := self.cache.get(key):
            return found

        def make() -> tuple[TransferPlan, Layout, Layout]:
            if parts:
                target = Layout(specs, tuple(Placement(name, region, receiver) for name, region in parts))
            else:
                target = full_layout(list(specs.values()), [receiver])
            source = self.store_layout(model, specs)
            plan = plan_transfers(demands_of(refine(source, target)), self._link_of, key.plan_id)
            return plan, source, target

        made = await asyncio.to_thread(make)
        self.cache.put(key, *made)
        return made[0]

    def _digest(self, parts: tuple[Part, ...]) -> str:
        """The P of a plan's key. Finding the parts again costs a tenth of digesting them."""
        if not parts:
            return "whole"
        if parts not in self._digests:
            if len(self._digests) >= _MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]
            self._digests[parts] = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
        return self._digests[parts]
