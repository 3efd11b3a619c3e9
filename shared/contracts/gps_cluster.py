"""Global Parameter Storage, node to node. Who asks whom, in the order of a Write:

    writer's node → leader       BeginWrite      leader → every node   OpenSpare
    writer's node → leader       WriterDone      leader → receiver     FetchSlices (per stage)
    receiver → sender            HashSlices      leader → every node   SealShard
    leader → KV commit.<model>   VersionCommit   leader → every node   FlipVersion

The bytes go beside it, one-sided, by the transport.
"""

from typing import Literal

from pydantic import Field

from shared.contracts.base import Message
from shared.contracts.gps import WriteRequest

MAX_SLICES = 4096
"""Slices in one message: about 0.5 MiB. More go in several messages."""

MemberState = Literal["joining", "serving", "gone"]


class NodeHeartbeat(Message):
    """gps → gps nodes, core publish. `incarnation` is new with every life of the process."""

    node: int
    incarnation: str
    leaving: bool = False


class ClusterMember(Message):
    """A node as the view knows it: `joining` fills its shards, `serving` is read from, `gone` is away."""

    node: int
    state: MemberState
    incarnation: str


class ClusterView(Message):
    """gps → gps nodes, KV `view`, written by compare-and-set: who holds what. `epoch` grows with every change
    that moves a transfer; every group of `groups` holds the whole model, its members a shard each."""

    epoch: int
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    members: tuple[ClusterMember, ...] = ()

    def summary(self) -> str:
        states = ", ".join(f"{m.node} {m.state}" for m in self.members)
        return f"epoch {self.epoch}: groups of {self.group_size}; {states}"


class VersionCommit(Message):
    """gps leader → all nodes, KV `commit.<model>`, written by compare-and-set: the one moment at which a
    version becomes readable. `holders`: node → checksum of its shard. `lineage` grows when a model had to
    begin again from `source`, because no copy was left. `next_write` is the Write that may follow: opening
    one moves the record's revision, so that a coordinator that was replaced cannot commit any more."""

    model: str
    version: int
    write_id: str
    checksum: str
    holders: dict[str, str] = Field(default_factory=dict)
    lineage: int = 0
    source: str = ""
    next_write: str = ""

    def summary(self) -> str:
        return f"{self.model} version {self.version} by {self.source or self.write_id}"


class DescribePeer(Message):
    """gps → gps node: answer with your `PeerInfo`. `digest` is of the asker's tensors and how it stores them:
    with another one no bytes may move, since each side works out where they lie."""

    node: int
    digest: str = ""


class LeaseVersion(Message):
    """gps → gps node: keep exactly `version` of your shard until released, or for `lease_s`."""

    model: str
    version: int
    lineage: int
    receiver: str
    lease_s: float
    digest: str


class VersionLeased(Message):
    """gps node → gps: the region that holds it."""

    lease_id: str
    region: str


class ReleaseVersion(Message):
    """gps → gps node: the lease is not needed any more. NotFound if it had run out."""

    lease_id: str


class BeginWrite(Message):
    """a writer's node → leader. `node` is where the writer copies its bytes to."""

    node: int
    request: WriteRequest


class WriteBegun(Message):
    """leader → a writer's node: all spare buffers are open."""

    write_id: str
    version: int


class OpenSpare(Message):
    """leader → gps node: empty your spare buffer for this Write, once its readers have left. `after` is what
    stands: it must be readable on the node first, for the spare buffer may still hold it."""

    model: str
    version: int
    write_id: str
    wait_s: float
    after: VersionCommit


class SpareOpened(Message):
    """gps node → leader: the region where the shard goes, and the one where writers of this node put theirs
    (the same if the shard is the whole model)."""

    spare: str
    staging: str


class SliceBox(Message):
    """A box of a tensor."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class FetchSlices(Message):
    """leader → receiver: copy `slices` from `region` of node `sender` into your spare buffer and compare
    checksums. `is_staging` tells which of the sender's two layouts `region` has."""

    write_id: str
    model: str
    sender: int
    region: str
    is_staging: bool
    slices: tuple[SliceBox, ...]


class HashSlices(Message):
    """receiver → sender: checksums of these boxes of your `region`."""

    model: str
    region: str
    is_staging: bool
    slices: tuple[SliceBox, ...]


class SlicesHashed(Message):
    """sender → receiver: xxh3_64, in order."""

    checksums: tuple[str, ...]


class WriterDone(Message):
    """a writer's node → leader: all bytes of `writer` are here and agree with its checksums."""

    write_id: str
    writer: str
    node: int


class SealShard(Message):
    """leader → gps node: everything was fetched; checksum your whole shard."""

    write_id: str


class ShardSealed(Message):
    """gps node → leader."""

    checksum: str


class FlipVersion(Message):
    """leader → gps node: this was committed; make it readable."""

    commit: VersionCommit


class AbortWrite(Message):
    """leader → gps node, or a writer's node → leader: the Write ends without a version."""

    write_id: str
    reason: str


class QueryWrite(Message):
    """gps node → leader: how far is it?"""

    write_id: str
