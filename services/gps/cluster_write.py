"""A Write over several nodes, as its leader sees it. Pure: requests in, answers and plans out.

    open       writers join with their boxes, each at its own node        (all nodes' spare buffers are empty)
    moving     every writer's bytes are on its node; they go to all holders, stage by stage
    committing all shards agree, the record is being written: nobody may end the Write any more but the record
    committed  the record was written: the one moment at which the version is readable
    aborted    a node was lost, a copy or a checksum failed, writers were restarted: the old version stays

Invariants
    - A Write moves once: all its writers are done, their boxes were
      every element exactly once.
    - Nothing leaves `committed` or `aborted`.
    - A node that is lost while the Write is open or moving ends it, if it was one of the Write's nodes: a
      version is complete on every node that opened its spare buffer, or it is none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.gps.boxes import Part
from services.gps.checks import checked_cover
from services.gps.forwarding import Hop, forward
from services.gps.packing import Packing
from shared.contracts.gps import WriteRequest, WriteStatus
from shared.errors import Conflict, InvalidRequest
from shared.layout.tensor_layout import TensorSpec

Phase = Literal["open", "moving", "committing", "committed", "aborted"]


@dataclass(frozen=True, slots=True)
class JoinedWriter:
    """Where a writer's bytes lie, and which they are."""

    node: int
    parts: tuple[Part, ...]


@dataclass(slots=True)
class ClusterWrite:
    """`nodes` opened their spare buffers for it; `groups` are those of the view then."""

    write_id: str
    model: str
    version: int
    attempt: str
    writers: tuple[str, ...]
    nodes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    phase: Phase = "open"
    reason: str = ""
    joined: dict[str, JoinedWriter] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.phase in ("committed", "aborted")

    @property
    def pending(self) -> tuple[str, ...]:
        return tuple(writer for writer in self.writers if writer not in self.done)

    def status(self) -> WriteStatus:
        return WriteStatus(
            write_id=self.write_id,
            version=self.version,
            committed=self.phase == "committed",
            pending_writers=() if self.is_over else self.pending,
        )

    def takes(self, request: WriteRequest) -> bool:
        """Whether `request` joins this Write; if not, it is of restarted writers and begins another."""
        if self.phase not in ("open", "moving"):
            return False
        same = (self.version, self.attempt, self.writers) == (
            request.version,
            request.attempt,
            request.writers,
        )
        return same and (request.writer not in self.joined or bool(request.attempt))

    def join(self, request: WriteRequest, writer: JoinedWriter, specs: Mapping[str, TensorSpec]) -> None:
        """Raises InvalidRequest if boxes changed within the attempt, or this is the last writer and all boxes
        together are not the model. Then nothing has changed."""
        assert self.takes(request)
        if request.writer in self.joined:
            if self.joined[request.writer] != writer:
                remedy = "Restart all writers with another attempt"
                problem = f"differ from those that {request.writer} named in this attempt, or it moved"
                raise InvalidRequest("boxes", problem, remedy)
            return
        joined = {**self.joined, request.writer: writer}
        if len(joined) == len(self.writers):
            checked_cover(specs, (part for other in joined.values() for part in other.parts))
        self.joined = joined

    def finish(self, writer: str, node: int) -> bool:
        """All bytes of `writer` lie on `node`; whether the Write moves now.

        Raises Conflict for a Write that is over, or a writer that did not begin it there.
        """
        if self.phase == "aborted":
            raise Conflict(f"Write {self.write_id} was aborted: {self.reason}", write_id=self.write_id)
        if self.is_over:
            return False
        known = self.joined.get(writer)
        if known is None or known.node != node:
            raise Conflict(
                f"{writer} did not begin Write {self.write_id} at node {node}. Begin it there first",
                write_id=self.write_id,
                field="writer",
                remedy="begin the Write first",
            )
        self.done.add(writer)
        if self.pending or self.phase != "open":
            return False
        self.phase = "moving"
        return True

    def hops(self, packings: Mapping[int, Packing]) -> list[Hop]:
        """The copies that bring every byte to every holder. Raises Conflict if no group is complete."""
        assert self.phase == "moving"
        written = [
            (writer.node, tensor, region)
            for writer in self.joined.values()
            for tensor, region in writer.parts
        ]
        return forward({node: packings[node] for node in self.nodes}, self.groups, written)

    def lose(self, serving: Iterable[int]) -> bool:
        """The nodes that serve now; whether that ends the Write."""
        lost = sorted(set(self.nodes) - set(serving))
        if not lost:
            return False
        return self.abort(f"node {', '.join(map(str, lost))} was lost")

    def abort(self, reason: str) -> bool:
        """End it without a version; False if it is over, or too late."""
        if self.phase not in ("open", "moving"):
            return False
        self.phase, self.reason = "aborted", reason
        return True

    def start_commit(self) -> None:
        """The record is going to be written."""
        assert self.phase == "moving", self.phase
        self.phase = "committing"

    def refuse(self, reason: str) -> None:
        """The record was not written: somebody else moved it."""
        assert self.phase == "committing", self.phase
        self.phase, self.reason = "aborted", reason

    def commit(self) -> None:
        """The record names it."""
        assert self.phase == "committing", self.phase
        self.phase = "committed"


def shard_problem(packings: Mapping[int, Packing], checksums: Mapping[int, str]) -> str | None:
    """Two nodes with equal shards but different checksums, in words; None if all agree."""
    seen: dict[tuple[tuple[str, object], ...], int] = {}
    for node in sorted(checksums):
        kind = tuple(sorted((name, (box.start, box.shape)) for name, box in packings[node].boxes.items()))
        first = seen.setdefault(kind, node)
        if checksums[first] != checksums[node]:
            return f"node {first} has checksum {checksums[first]}, node {node} has {checksums[node]}"
    return None


def batches(hops: Sequence[Hop], max_slices: int) -> list[list[list[Hop]]]:
    """Per stage, the hops in messages: one (receiver, sender) each, at most `max_slices` long."""
    stages: dict[int, dict[tuple[int, int], list[Hop]]] = {}
    for hop in hops:
        stages.setdefault(hop.stage, {}).setdefault((hop.receiver, hop.sender), []).append(hop)
    return [
        [same[i : i + max_slices] for same in stages[stage].values() for i in range(0, len(same), max_slices)]
        for stage in sorted(stages)
    ]
