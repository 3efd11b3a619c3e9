"""Pulling a version from other nodes: lease it there, copy, give the leases back (paper §5.1, Read).

    lease on every sender     exactly this version, or the sender is left out and the plan made anew
    copy                      one-sided, from all senders at once
    release                   a lease that had run out means that what was copied may be torn: again

A sender that fails or is late is left out at once; the view follows when its heartbeats stop. What it was
asked for may still arrive, when a link comes back, and not even of that version: its buffer may have moved
on. So the next attempt goes to other memory, and what a given-up copy had for a target is filled no more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.gps.holder import Holder
from services.gps.packing import Packing, spans_between
from services.gps.view_plans import Slices, ViewPlans, by_sender
from shared.contracts.base import Done
from shared.contracts.gps_cluster import LeaseVersion, ReleaseVersion, VersionLeased
from shared.errors import BusError, Conflict, DeadlineExceeded, NotFound, PivotError, TransportError
from shared.layout.spans import Spans
from shared.layout.tensor_layout import Box
from shared.layout.transfer_plan import TransferPlan
from shared.weights.peer_links import Pull

MAX_SHARES = 64
_log = logging.getLogger("pivotrl.gps")


@dataclass(slots=True)
class Target:
    """Where a pull goes: a registered region of this node, its memory and its layout. It `is_torn` while
    copies into it have not ended, and for ever if they were given up."""

    region: str
    memory: NDArray[np.uint8]
    packing: Packing
    is_torn: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What one sender of a plan sends: slices, and their bytes there and here."""

    slices: list[tuple[str, Box]]
    theirs: Spans
    ours: Spans


@dataclass(frozen=True, slots=True)
class _Source:
    node: int
    lease: VersionLeased
    share: _Share


@dataclass(slots=True)
class RemoteReads:
    """Pulls into regions of `holder`'s node, as `plans` say."""

    holder: Holder
    plans: ViewPlans
    num_pulled_bytes: int = 0
    num_pulled_ranges: int = 0
    """Descriptors that those bytes came in."""
    num_reroutes: int = 0
    _shares: dict[tuple[str, bool], dict[int, _Share]] = field(default_factory=dict)
    """By plan id, which names the epoch, and whether the target is canonical: worked out once per plan."""

    async def pull(
        self,
        model: str,
        version: int,
        lineage: int,
        receiver: str,
        boxes: Slices,
        target: Callable[[], Awaitable[Target]],
        deadline_s: float,
        *,
        has_proof: bool = False,
    ) -> TransferPlan | None:
        """Fill `boxes` of the last `target` asked for with `version`; the plan that did it, None if there was
        nothing to do.

        `target` is asked before every attempt, and must not give one again that is torn. With `has_proof`,
        every slice's checksum is compared with its sender's.

        Raises:
            Conflict: no serving node has this version of a part (any more).
            DeadlineExceeded, TransportError: the last sender that could have helped failed; names it.
        """
        if not boxes:
            return None
        now_s = self.holder.now_s
        end_s = now_s() + deadline_s
        excluded: frozenset[int] = frozenset()
        failure: PivotError | None = None
        while True:
            try:
                plan = await self.plans.for_boxes(model, receiver, boxes, excluded)
            except Conflict:
                if failure is not None:
                    raise failure from None
                raise
            failed, failure = await self._attempt(
                plan, model, version, lineage, receiver, await target(), max(end_s - now_s(), 0.1), has_proof
            )
            if failure is None:
                return plan
            if isinstance(failure, BusError) or now_s() >= end_s or not failed:
                raise failure
            self.num_reroutes += 1
            excluded |= failed
            _log.warning("%s v%d for %s goes another way: %s", model, version, receiver, failure)

    async def _attempt(
        self,
        plan: TransferPlan,
        model: str,
        version: int,
        lineage: int,
        receiver: str,
        target: Target,
        deadline_s: float,
        has_proof: bool,
    ) -> tuple[frozenset[int], PivotError | None]:
        """Which senders failed, and how the first of them did."""
        wanted = await self._shares_of(plan, model, target)
        question = LeaseVersion(
            model=model,
            version=version,
            lineage=lineage,
            receiver=receiver,
            lease_s=deadline_s + self.holder.cluster.config.control_deadline_s,
            digest=self.holder.cluster.digest,
        )
        answers = await asyncio.gather(
            *(self.holder.cluster.ask(node, "lease", question, VersionLeased) for node in wanted),
            return_exceptions=True,
        )
        sources, errors = [], {}
        for (node, share), answer in zip(wanted.items(), answers, strict=True):
            if isinstance(answer, PivotError):
                errors[node] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                sources.append(_Source(node, answer, share))
        try:
            if not errors:
                errors = await self._copy(plan, model, sources, target, deadline_s, has_proof)
        finally:
            late = await self._release(sources)
        errors = errors or late
        return frozenset(errors), next(iter(errors.values()), None)

    async def _shares_of(self, plan: TransferPlan, model: str, target: Target) -> dict[int, _Share]:
        cluster = self.holder.cluster
        key = (plan.plan_id, target.packing is cluster.canonical(model))
        if found := self._shares.get(key):
            return found
        seated = [node for group in cluster.view.groups for node in group]
        packings = {node: cluster.packing(model, node) for node in seated}

        def make() -> dict[int, _Share]:
            return {
                node: _Share(slices, *spans_between(packings[node], target.packing, slices))
                for node, slices in by_sender(plan).items()
            }

        made = await asyncio.to_thread(make)
        self._shares[key] = made
        if len(self._shares) > MAX_SHARES:
            del self._shares[next(iter(self._shares))]
        return made

    async def _copy(
        self,
        plan: TransferPlan,
        model: str,
        sources: list[_Source],
        target: Target,
        deadline_s: float,
        has_proof: bool,
    ) -> dict[int, PivotError]:
        cluster = self.holder.cluster
        agents: dict[str, int] = {}
        pulls = []
        for source in sources:
            try:
                info = await cluster.info(source.node, source.lease.region)
            except PivotError as error:
                return {source.node: error}
            agents[info.agent] = source.node
            pulls.append(
                Pull(
                    peer=info,
                    remote_region=source.lease.region,
                    theirs=source.share.theirs,
                    local_region=target.region,
                    ours=source.share.ours,
                    key=f"{plan.plan_id}/{source.node}",
                )
            )
        try:
            target.is_torn = True
            self.num_pulled_bytes += await cluster.links.pull(pulls, deadline_s)
            target.is_torn = False
            self.num_pulled_ranges += sum(len(pull.ours) for pull in pulls)
            self.holder.check_transport()
            if has_proof:
                for source in sources:
                    await self.holder.compare(
                        model,
                        source.node,
                        source.lease.region,
                        source.share.slices,
                        target.memory,
                        target.packing,
                        is_staging=False,
                    )
        except (TransportError, DeadlineExceeded, NotFound) as error:
            named = str(error.data.get("peer", ""))
            guilty = agents.get(named) if named in agents else None
            for source in sources:
                if guilty is None and named == f"gps-{source.node}":
                    guilty = source.node
            if guilty is None:
                raise
            await cluster.forget(guilty)
            return {guilty: error}
        return {}

    async def _release(self, sources: list[_Source]) -> dict[int, PivotError]:
        """Senders whose lease had run out."""
        answers = await asyncio.gather(
            *(
                self.holder.cluster.ask(s.node, "release", ReleaseVersion(lease_id=s.lease.lease_id), Done)
                for s in sources
            ),
            return_exceptions=True,
        )
        return {
            source.node: answer
            for source, answer in zip(sources, answers, strict=True)
            if isinstance(answer, PivotError)
        }
