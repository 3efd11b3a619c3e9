"""Global Parameter Storage: versions on the bus, Read and Write over HTTP."""

from shared.contracts.base import Message


class PolicyVersion(Message):
    """gps → all, KV `policy.version`: the version that Reads now get. Flips once per committed Write."""

    model: str
    version: int
    layout_epoch: int
    checksum: str
    source: str = ""

    def summary(self) -> str:
        return f"{self.model} version {self.version} ({self.checksum[:12]})"


class PoolTensor(Message):
    """One canonical tensor in a pool region from `offset_bytes` on: row-major, unless the view's `sliced`
    says otherwise. `dtype` as torch names it: "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


class SlicedTensors(Message):
    """Tensors of one shape that are stored slice after slice, each row-major: their boxes, in storage
    order."""

    tensors: tuple[str, ...]
    starts: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]


class PoolView(Message):
    """A mapped region of the host pool that holds one version of one model. `path` is a shared-memory
    file."""

    path: str
    nbytes: int
    tensors: tuple[PoolTensor, ...]
    sliced: tuple[SlicedTensors, ...] = ()
    """Tensors that do not appear here are stored row-major."""


class TensorBox(Message):
    """Part of a canonical tensor: an n-dimensional box, or (`flat_start` given) a row-major flat range.
    `dtype`, if given, must be the tensor's."""

    tensor: str
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    flat_start: int | None = None
    flat_count: int = 0
    dtype: str = ""


class ReadRequest(Message):
    """replica or rank → gps: Read(M, G, P) for one receiver. `boxes` is its layout; empty means the whole
    model."""

    model: str
    receiver: str
    min_version: int = 0
    boxes: tuple[TensorBox, ...] = ()
    lease_s: float = 120.0
    wait_s: float = 0.0
    """How long to wait for `min_version` to be committed before the answer is a conflict."""


class ReadGrant(Message):
    """gps → receiver: the version it gets, a lease that keeps that version's buffer, and where the bytes are.

    Release with `DELETE /v1/read/{lease_id}` when done.
    """

    model: str
    version: int
    lease_id: str
    view: PoolView
    plan_id: str
    nbytes: int


class WriteRequest(Message):
    """rank → gps: Write of version `version` by `writer`, one of `writers`. Its `boxes` are what it holds."""

    model: str
    version: int
    writer: str
    writers: tuple[str, ...]
    boxes: tuple[TensorBox, ...]
    attempt: str = ""
    """Equal for all writers of one life of the training ranks. A repeated request of the same attempt gets
    the same grant; another attempt (or none) replaces a torn Write."""
    wait_s: float = 30.0
    """How long to wait for readers of the spare buffer to leave before the answer is a conflict."""


class WriteGrant(Message):
    """gps → rank: the spare buffer to copy into. The same `write_id` for every writer of one version."""

    write_id: str
    model: str
    version: int
    view: PoolView


class WriteCommit(Message):
    """rank → gps: every byte of its boxes is in place. `checksums` (xxh3_64 hex) in the order of its
    boxes."""

    writer: str
    checksums: tuple[str, ...]


class WriteStatus(Message):
    """gps → rank. `committed` turns true once, for the whole version, when the last writer has committed."""

    write_id: str
    version: int
    committed: bool
    pending_writers: tuple[str, ...]


class ModelStatus(Message):
    """gps → anyone: one model of the host pool. `leases` hold the readable version or an older one."""

    model: str
    version: int
    checksum: str
    dtype: str
    nbytes: int
    num_tensors: int
    is_frozen: bool
    leases: tuple[str, ...] = ()
    open_write: WriteStatus | None = None


class PeerRegion(Message):
    """A registered region that peers may copy from and to. `path` is set where it is a shared-memory file."""

    name: str
    address: int
    nbytes: int
    kind: str = "DRAM"
    device: int = 0
    path: str = ""


class PeerInfo(Message):
    """transport → peer's transport: who it is and what it registered. `metadata` is the agent's blob,
    base64."""

    transport: str
    agent: str
    metadata: str = ""
    regions: tuple[PeerRegion, ...] = ()


class ReceiverRequest(Message):
    """replica or rank → gps of a sharded node: a landing buffer for what this receiver Reads. Asked once; the
    buffer is registered with the transport and reused. Empty `boxes` mean the whole model."""

    model: str
    boxes: tuple[TensorBox, ...] = ()


class ReceiverStatus(Message):
    """gps → receiver. `view` is where every Read of it lands; None if the node holds the whole model and none
    is needed."""

    receiver: str
    model: str
    nbytes: int
    view: PoolView | None = None


class LoadRequest(Message):
    """anyone → gps: make the next version of a model from a Hugging Face folder under the run folder."""

    path: str


class NodeStatus(Message):
    """One node of parameter storage. `group` is -1 while it waits for one."""

    node: int
    state: str
    group: int
    address: str = ""


class TransportStatus(Message):
    """What carries parameters between nodes: what was asked for, and what UCX chose ("tcp on eth0")."""

    wanted: str
    lanes: tuple[str, ...] = ()
    explain: str = ""


class NodesStatus(Message):
    """gps → anyone: the cluster as this node sees it. `reseeded` says which models began again, and why.
    `waits_for` is None once this node serves."""

    node: int
    epoch: int
    group_size: int
    leader: int | None
    is_cut_off: bool
    nodes: tuple[NodeStatus, ...]
    transport: TransportStatus | None = None
    reseeded: tuple[str, ...] = ()
    waits_for: str | None = None
