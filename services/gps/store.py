"""Which version of a model is readable, and how the next one becomes so (paper §5.1; Write in Figure 5b).

Every model has a readable buffer; one that trains has a spare. The store moves no bytes and reads no clock:
copies are made by the ranks, checksums by `Verification` and `Seal` in a thread, time comes in as `now_s`.

    begin_write        joins or opens the Write of a version > the readable one; nobody reads the spare
    start_commit       → Verification, to be run outside
    finish_commit      the writer's bytes agree; for the last writer → Seal, to be run outside
    finish_seal        flips: the spare becomes readable, the readable becomes the spare

Invariants
    - The readable version only grows, and its bytes do not change while it is readable or a lease holds it.
    - A version is readable only after all its writers committed, their boxes were every element exactly once,
      and every checksum was found in the buffer.
    - A Write that is replaced or abandoned never becomes a version, even if its checks are still running;
      its buffer is given up for a fresh one, so that writers that still live scribble on nobody's memory.
    - A lease that ran out is gone: its release fails, which tells the reader that it may have torn bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.gps.boxes import spec_of
from services.gps.checks import check_commit, check_read, check_write, checked_cover, wrong_checksum
from services.gps.versions import Buffer, Granted, Lease, Model, OpenWrite, Seal, Verification, WriterPart
from shared.contracts.gps import (
    ModelStatus,
    PoolTensor,
    ReadRequest,
    WriteCommit,
    WriteGrant,
    WriteRequest,
    WriteStatus,
)
from shared.errors import Conflict, InvalidRequest, NotFound, told
from shared.layout.sliced_storage import SlicedStorage
from shared.layout.tensor_layout import TensorSpec
from shared.weights.host_pool import HostPool, PoolRegion


@dataclass(slots=True)
class Store:
    """Models over a `pool`. `new_id` makes ids that nobody can guess; leases last at most `max_lease_s`."""

    pool: HostPool
    new_id: Callable[[], str]
    max_lease_s: float = 600.0
    _models: dict[str, Model] = field(default_factory=dict)

    # models

    def add_model(
        self,
        name: str,
        tensors: Sequence[PoolTensor],
        nbytes: int,
        *,
        is_frozen: bool,
        adopted: PoolRegion | None = None,
        num_regions: int = 0,
        specs: Mapping[str, TensorSpec] | None = None,
        storages: Mapping[str, SlicedStorage] | None = None,
    ) -> PoolRegion:
        """Reserve the buffers of a model and give the one to seed. Raises ConfigError if they do not fit.

        `adopted` is a region that an earlier life of GPS filled; it had made `num_regions` of this model.
        `specs` are the whole tensors, where `tensors` are only pieces of them; `storages` names those that
        every buffer, the adopted one too, stores slice by slice.
        """
        assert name not in self._models, f"model {name} was added before"
        specs = dict(specs) if specs else {tensor.name: spec_of(tensor) for tensor in tensors}
        by_name = {tensor.name: tensor for tensor in tensors}
        model = Model(name, tuple(tensors), nbytes, is_frozen, [], specs, by_name, storages or {})
        num_new = (1 if is_frozen else 2) - (adopted is not None)
        self.pool.check_room(num_new * nbytes, f"{name} with {num_new} new buffer(s)")
        if adopted is not None:
            model.num_regions = num_regions
            model.buffers.append(Buffer(adopted, model.view_of(adopted)))
        for _ in range(num_new):
            model.buffers.append(self._new_buffer(model))
        self._models[name] = model
        return model.readable.region

    def publish_seed(self, name: str, version: int, checksum: str) -> None:
        """The seeded buffer holds `version`."""
        model = self.model(name)
        assert model.version < 0, f"model {name} was seeded before"
        model.version, model.checksum, model.readable.version = version, checksum, version

    def has(self, name: str) -> bool:
        return name in self._models

    def model(self, name: str) -> Model:
        if name not in self._models:
            problem = f"GPS holds no model {name!r}; it holds {sorted(self._models)}"
            raise NotFound(**told("model", problem, "Name one of those", model=name))
        return self._models[name]

    def models(self, now_s: float) -> tuple[ModelStatus, ...]:
        return tuple(self.status(name, now_s) for name in sorted(self._models))

    def status(self, name: str, now_s: float) -> ModelStatus:
        model = self.model(name)
        self.expire(model, now_s)
        return model.status()

    def _new_buffer(self, model: Model) -> Buffer:
        model.num_regions += 1
        region = self.pool.create(model.name, f"b{model.num_regions}", model.nbytes)
        return Buffer(region, model.view_of(region))

    # reads

    def read(self, request: ReadRequest, now_s: float) -> Granted:
        """Lease the readable version. Raises NotFound, InvalidRequest, or Conflict if `min_version` is not
        there."""
        model = self.check_read(request)
        self.expire(model, now_s)
        lease = Lease(self.new_id(), request.receiver, model.version, now_s + request.lease_s)
        model.readable.leases[lease.lease_id] = lease
        return Granted(lease, model.readable.view, model)

    def check_read(self, request: ReadRequest) -> Model:
        """The model, if `request` can be served now. Raises as `read` does."""
        model = self.model(request.model)
        check_read(model, request, self.max_lease_s)
        return model

    def release(self, lease_id: str, now_s: float) -> None:
        """End a lease. Raises NotFound if it is unknown or ran out."""
        for model in self._models.values():
            self.expire(model, now_s)
            for buffer in model.buffers:
                if buffer.leases.pop(lease_id, None):
                    return
        problem = f"no lease {lease_id}: it was released, or ran out"
        raise NotFound(**told("lease_id", problem, "Read again, with a longer lease_s", lease_id=lease_id))

    def release_quietly(self, lease_id: str) -> None:
        """End a lease, if it has not run out."""
        for model in self._models.values():
            for buffer in model.buffers:
                buffer.leases.pop(lease_id, None)

    def expire(self, model: Model, now_s: float) -> None:
        """Forget leases that ran out."""
        for buffer in model.buffers:
            for lease in [found for found in buffer.leases.values() if found.expires_s <= now_s]:
                del buffer.leases[lease.lease_id]

    def readers_leave_s(self, name: str, now_s: float) -> float | None:
        """When the last lease on the spare buffer of `name` runs out; None if nobody holds it."""
        model = self.model(name)
        if model.is_frozen:
            return None
        self.expire(model, now_s)
        return max((lease.expires_s for lease in model.spare.leases.values()), default=None)

    # writes

    def check_write(self, request: WriteRequest) -> WriterPart:
        """What the writer holds. Raises what no waiting can mend: NotFound, InvalidRequest, Conflict on the
        version."""
        return check_write(self.model(request.model), request)

    def begin_write(self, request: WriteRequest, now_s: float) -> WriteGrant:
        """Join the Write of this version, or open it; a torn one of dead writers is replaced.

        Raises, besides what `check_write` does:
            Conflict: readers hold the spare buffer; try again when they have left.
            InvalidRequest: this is the last writer to join and all boxes together are not the model.
        """
        part = self.check_write(request)
        model = self.model(request.model)
        write = model.write
        joins = write is not None and write.is_of(request)
        if write is not None and joins and request.writer in write.joined:
            if request.attempt and write.joined[request.writer].parts != part.parts:
                problem = f"differ from those that {request.writer} named in this attempt"
                raise InvalidRequest("boxes", problem, "Restart all writers with another attempt")
            if request.attempt:
                return self._grant(model, write)
            joins = False
        joined = {**(write.joined if write is not None and joins else {}), request.writer: part}
        if len(joined) == len(request.writers):  # before anything changes
            checked_cover(model.specs, (p for other in joined.values() for p in other.parts))
        if write is None or not joins:
            write = self._open_write(model, request, now_s)
        write.joined = joined
        return self._grant(model, write)

    def _open_write(self, model: Model, request: WriteRequest, now_s: float) -> OpenWrite:
        self.empty_spare(model, now_s)
        model.write = OpenWrite(self.new_id(), model.name, request.version, request.attempt, request.writers)
        return model.write

    def empty_spare(self, model: Model, now_s: float) -> None:
        """Make the spare buffer ready to be filled; a torn one is replaced, for its writers may still live.

        Raises Conflict if readers hold it.
        """
        self.expire(model, now_s)
        if holders := sorted({lease.receiver for lease in model.spare.leases.values()}):
            problem = f"readers hold the spare buffer of {model.name}: {', '.join(holders)}"
            remedy = "wait until they release their leases, or until those run out"
            raise Conflict(
                f"{problem}. {remedy}", model=model.name, holders=holders, field="wait_s", remedy=remedy
            )
        model.write = None
        if model.spare.is_dirty:
            self.replace(model, model.spare)
        model.spare.is_dirty, model.spare.version = True, None

    def replace(self, model: Model, buffer: Buffer) -> None:
        """A fresh region instead of one that somebody may still write into."""
        at = next(index for index, found in enumerate(model.buffers) if found is buffer)
        self.pool.remove(buffer.region)
        model.buffers[at] = self._new_buffer(model)

    def _grant(self, model: Model, write: OpenWrite) -> WriteGrant:
        return WriteGrant(
            write_id=write.write_id, model=model.name, version=write.version, view=model.spare.view
        )

    def write_status(self, write_id: str) -> WriteStatus:
        """Raises NotFound if the Write is unknown, abandoned or replaced."""
        for model in self._models.values():
            if model.write is not None and model.write.write_id == write_id:
                return model.write.status()
            if model.last_committed is not None and model.last_committed.write_id == write_id:
                return model.last_committed
        problem = f"no Write {write_id}: it was abandoned, or replaced by restarted writers"
        raise NotFound(**told("write_id", problem, "Begin the Write again", write_id=write_id))

    def start_commit(self, write_id: str, commit: WriteCommit) -> Verification | WriteStatus:
        """What to check for this commit, or the status if there is nothing left to check.

        Raises:
            NotFound: the Write is unknown, abandoned or replaced.
            InvalidRequest: not a writer of it, or not one checksum per box.
            Conflict: the writer did not begin it.
        """
        status = self.write_status(write_id)
        if status.committed:
            return status
        model, write = self._open(write_id)
        part = check_commit(write_id, commit, write.writers, write.joined)
        claimed, memory = (write, commit.writer, part.parts, commit.checksums), model.spare.region.memory
        return Verification(*claimed, model.specs, model.by_name, memory, model.storages)

    def finish_commit(self, done: Verification, problem: tuple[int, str] | None) -> Seal | WriteStatus:
        """Record the outcome; a `Seal` if this was the last writer.

        Raises:
            NotFound: the Write was abandoned or replaced meanwhile.
            InvalidRequest: `problem`; the writer may copy and commit again.
        """
        model, write = self._open(done.write.write_id)
        if problem is not None:
            raise wrong_checksum(problem)
        write.joined[done.writer].checksums = done.checksums
        if write.pending or write.is_sealing:
            return write.status()
        write.is_sealing = True
        known = write.whole_checksums(model.specs)
        return Seal(write, model.tensors, model.spare.region.memory, known, model.storages)

    def finish_seal(self, seal: Seal, checksum: str | None) -> WriteStatus:
        """Flip to the new version; `checksum` None means that it could not be computed, and the Write stays
        open.

        Raises NotFound if the Write was abandoned or replaced meanwhile.
        """
        model, write = self._open(seal.write.write_id)
        write.is_sealing = False
        if checksum is None:
            return write.status()
        assert not write.pending
        assert write.version > model.version
        model.spare.is_dirty, model.spare.version = False, write.version
        model.current = 1 - model.current
        model.version, model.checksum, model.write = write.version, checksum, None
        model.last_committed = WriteStatus(
            write_id=write.write_id, version=write.version, committed=True, pending_writers=()
        )
        return model.last_committed

    def abandon(self, write_id: str) -> None:
        """Give up an open Write; the readable version stays. Raises NotFound; Conflict if it was
        committed."""
        if self.write_status(write_id).committed:
            raise Conflict(f"Write {write_id} is committed", write_id=write_id)
        self._open(write_id)[0].write = None

    def _open(self, write_id: str) -> tuple[Model, OpenWrite]:
        for model in self._models.values():
            if model.write is not None and model.write.write_id == write_id:
                return model, model.write
        raise NotFound(f"no open Write {write_id}: it was abandoned or replaced", write_id=write_id)
