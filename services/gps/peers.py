"""What this node knows of its cluster, and how it asks the other nodes."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from services.gps.membership import group_of, serving
from services.gps.packing import Packing, Storages, models_digest, pack_member, pack_whole
from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.gps import PeerInfo
from shared.contracts.gps_cluster import ClusterView, DescribePeer, VersionCommit
from shared.contracts.subjects import Subjects
from shared.errors import Conflict, DeadlineExceeded, NoResponder, TransportError, told
from shared.layout.tensor_layout import TensorSpec
from shared.runtime.config import GpsSection
from shared.weights.peer_links import PeerLinks

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_log = logging.getLogger("pivotrl.gps")


@dataclass(slots=True)
class Cluster:
    """Shared by the parts of one node's GPS. `view` and `commits` are replaced as the record of them moves;
    `specs` are the whole tensors of each model and `storages` how those are stored that are not row-major:
    equal on every node."""

    node: int
    incarnation: str
    config: GpsSection
    bus: Bus
    subjects: Subjects
    links: PeerLinks
    specs: Mapping[str, Mapping[str, TensorSpec]]
    storages: Mapping[str, Storages]
    view: ClusterView
    commits: dict[str, VersionCommit] = field(default_factory=dict)
    _infos: dict[int, PeerInfo] = field(default_factory=dict)
    _packings: dict[tuple[str, tuple[int, ...], int], Packing] = field(default_factory=dict)
    _digest: str = ""

    @property
    def name(self) -> str:
        return f"gps-{self.node}"

    @property
    def digest(self) -> str:
        """Of the tensors and their storage."""
        if not self._digest:
            self._digest = models_digest(self.specs, self.storages)
        return self._digest

    def check_digest(self, asker: str, digest: str) -> None:
        """Raises Conflict if `asker` means other tensors, or stores them otherwise: no bytes may move."""
        if digest != self.digest:
            problem = f"{asker} has other tensors than {self.name}, or stores them for other layouts"
            remedy = "Give every node the same model folders and the same run.json"
            raise Conflict(**told("models", problem, remedy))

    def packing(self, model: str, node: int) -> Packing:
        """What `node` holds of `model`. It must have a place in a group."""
        group = group_of(self.view, node)
        assert group, f"node {node} has no place"
        key = (model, group, node)
        if key not in self._packings:
            if len(self._packings) > 4096:
                self._packings.clear()
            self._packings[key] = pack_member(self.specs[model], self.storages[model], group, node)
        return self._packings[key]

    def canonical(self, model: str) -> Packing:
        """The layout that engines and ranks map."""
        key = (model, (), -1)
        if key not in self._packings:
            self._packings[key] = pack_whole(self.specs[model], self.storages[model])
        return self._packings[key]

    def others(self) -> tuple[int, ...]:
        """Serving nodes but this."""
        return tuple(node for node in serving(self.view) if node != self.node)

    async def ask(
        self, node: int, command: str, message: Message, reply: type[M], *, deadline_s: float | None = None
    ) -> M:
        """A command to `node`. Its error is raised here; DeadlineExceeded names it and the command.

        A node that stops to serve meanwhile is not waited for: NoResponder.
        """
        limit_s = self.config.control_deadline_s if deadline_s is None else deadline_s
        asking = asyncio.create_task(
            self.bus.request(
                self.subjects.gps_node(node, command),
                message,
                reply,
                deadline_s=limit_s,
                role=self.name,
                peer=f"gps-{node}",
                phase=command,
            )
        )
        try:
            while True:
                was_serving = node in serving(self.view)
                done, _ = await asyncio.wait([asking], timeout=self.config.heartbeat_s)
                if done:
                    return asking.result()
                if was_serving and node not in serving(self.view):
                    raise NoResponder(role=self.name, peer=f"gps-{node}", phase=command, deadline_s=limit_s)
        finally:
            asking.cancel()

    async def info(self, node: int, region: str) -> PeerInfo:
        """Where `region` of `node` is. Asked again when the node has registered new ones.

        Raises TransportError if the node has no such region; DeadlineExceeded if it does not answer.
        """
        found = self._infos.get(node)
        if found is None or all(r.name != region for r in found.regions):
            found = await self.ask(
                node, "describe", DescribePeer(node=self.node, digest=self.digest), PeerInfo
            )
            if (old := self._infos.get(node)) and old.agent != found.agent:
                await self._forget(old.agent)
            self._infos[node] = found
        if all(r.name != region for r in found.regions):
            raise TransportError(f"gps-{node} has no region {region}", peer=f"gps-{node}", region=region)
        return found

    async def forget(self, node: int) -> None:
        """`node` is gone, or was late: nothing of it may arrive any more."""
        if found := self._infos.pop(node, None):
            await self._forget(found.agent)

    async def _forget(self, agent: str) -> None:
        try:
            await self.links.forget(agent)
        except (TransportError, DeadlineExceeded) as error:
            _log.warning("the endpoint of %s is not closed: %s", agent, error)


async def gather_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All results. The first error is raised when every call has ended, so that none is left behind."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
