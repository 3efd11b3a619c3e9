"""The same update three ways: through GPS, the way of all-gather and broadcast, and from a checkpoint file.

Three processes: two ranks that hold a ZeRO-2 shard each, and one engine that wants the whole model (TP1).

    gps          both ranks copy their shards into the pool and checksum them; the engine copies them out
    gps read     the second half alone: what an engine waits for that wakes to a version already there
    gather       gloo all-gather among the ranks, then gloo broadcast from rank 0 to the engine, bucket by
                 bucket; the engine copies each bucket into its parameters. What trainers do that gather first
    safetensors  the engine loads a file that lies in the page cache: to compare with gps read, since what
                 gathering and writing the file took is not counted

Every process does its part of each way in turn, between barriers; times are from barrier to barrier, in the
engine. gloo goes over loopback TCP here, which is all it has on a machine without a fast fabric.
"""

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gps_bench.checkpoints import dense_of_size
from gps_bench.timing import interleaved
from shared.contracts.gps import PoolView
from shared.layout.tensor_layout import FlatRange, zero_range
from shared.weights.checksum import checksum_bytes
from shared.weights.export import write_safetensors
from shared.weights.host_pool import HostPool, lay_out
from shared.weights.mapped_pool import MappedPool, map_view

RANKS, ENGINE, WORLD = (0, 1), 2, 3
BUCKET_BYTES = 32 << 20
"""Of one rank."""


def measure(gb: float, repeats: int) -> dict[str, Any]:
    import torch.multiprocessing

    host = HostPool(run=f"benchpeers{os.getpid()}", node=0, budget_bytes=1 << 40)
    try:
        with tempfile.TemporaryDirectory() as folder:
            specs = dense_of_size(int(gb * 1e9))
            tensors, size = lay_out([(s.name, s.dtype, s.shape) for s in specs])
            path = str(host.create("policy", "b0", size).path)
            view = PoolView(path=path, nbytes=size, tensors=tensors)
            rng = np.random.default_rng(1)
            pool = map_view(view, writable=True)
            for tensor in tensors:
                raw = pool.raw(tensor.name)
                raw[:] = rng.integers(0, 256, raw.nbytes, np.uint8) % 120  # no NaN among them
            write_safetensors(view, Path(folder) / "model.safetensors")
            out = Path(folder) / "out.json"
            torch.multiprocessing.spawn(
                _process, (view.model_dump_json(), folder, repeats, str(out)), nprocs=WORLD
            )
            return {"same_update": json.loads(out.read_text())}
    finally:
        host.close()


def _process(rank: int, view_json: str, folder: str, repeats: int, out: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    trainers = dist.new_group(list(RANKS))
    pool = map_view(PoolView.model_validate_json(view_json), writable=True)
    member = _Member(rank, pool, trainers, Path(folder) / "model.safetensors")
    work = {
        "gps": member.gps,
        "gps read": member.read,
        "gather": member.gather,
        "safetensors": member.safetensors,
    }
    for way, do in work.items():  # exact first
        member.clear()
        dist.barrier()
        do()
        dist.barrier()
        member.check(way)
    barrier = partial(dist.barrier)
    times = interleaved({way: partial(_between, barrier, do) for way, do in work.items()}, repeats)
    if rank == ENGINE:
        rows = [
            {
                "way": way,
                "gb": round(member.nbytes / 1e9, 3),
                "seconds": round(times.median_s(way), 3),
                "gb_per_s": times.gb_per_s(member.nbytes, way),
                "times_gps": round(1 / times.ratio("gps", way), 2),
            }
            for way in work
        ]
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _between(barrier: Any, do: Any) -> None:
    barrier()
    do()
    barrier()


class _Member:
    """One of the three processes, with its shards or its parameters."""

    def __init__(self, rank: int, pool: MappedPool, trainers: Any, file: Path) -> None:
        import torch

        self.rank, self.pool, self.trainers, self.file = rank, pool, trainers, file
        self.numel = {t.name: int(np.prod(t.shape)) for t in pool.view.tensors}
        self.nbytes = 2 * sum(self.numel.values())
        self.truth = {name: checksum_bytes(pool.raw(name).data) for name in self.numel}
        self.ranges = {
            name: zero_range(numel, min(rank, 1), len(RANKS)) for name, numel in self.numel.items()
        }
        self.memory: dict[str, Any] = {}
        for name, numel in self.numel.items():
            held = self.ranges[name] if rank != ENGINE else FlatRange(0, numel)
            self.memory[name] = torch.empty(held.count, dtype=torch.int16)
            pool.copy_out(name, held, self.memory[name].numpy())

    def clear(self) -> None:
        if self.rank == ENGINE:
            for memory in self.memory.values():
                memory.zero_()

    def check(self, way: str) -> None:
        if self.rank == ENGINE:
            for name, memory in self.memory.items():
                assert checksum_bytes(memory.numpy().view(np.uint8).data) == self.truth[name], (way, name)

    def gps(self) -> None:
        import torch.distributed as dist

        if self.rank != ENGINE:
            for name, memory in self.memory.items():
                self.pool.copy_in(name, self.ranges[name], memory.numpy())
                checksum_bytes(memory.numpy().view(np.uint8).data)
        dist.barrier()  # the commit
        self.read()

    def read(self) -> None:
        if self.rank == ENGINE:
            for name, memory in self.memory.items():
                self.pool.copy_out(name, FlatRange(0, self.numel[name]), memory.numpy())

    def gather(self) -> None:
        import torch
        import torch.distributed as dist

        for name, memory in self.memory.items():
            size = -(-self.numel[name] // len(RANKS)) * 2
            held = memory.view(torch.uint8)
            for first in range(0, size, BUCKET_BYTES):
                count = min(BUCKET_BYTES, size - first)
                whole = torch.empty(len(RANKS) * count, dtype=torch.uint8)
                if self.rank != ENGINE:
                    mine = held[first : first + count]
                    if len(mine) < count:
                        mine = torch.nn.functional.pad(mine, (0, count - len(mine)))
                    dist.all_gather(list(whole.chunk(len(RANKS))), mine, group=self.trainers)
                dist.broadcast(whole, src=0)
                if self.rank == ENGINE:
                    for part, rank in zip(whole.chunk(len(RANKS)), RANKS, strict=True):
                        target = held[rank * size + first : rank * size + first + count]
                        target.copy_(part[: len(target)])

    def safetensors(self) -> None:
        import torch
        from safetensors import safe_open

        if self.rank == ENGINE:
            with safe_open(self.file, framework="pt") as file:
                for name, memory in self.memory.items():
                    memory.copy_(file.get_tensor(name).view(-1).view(torch.int16))
