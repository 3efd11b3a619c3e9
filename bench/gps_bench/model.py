"""A model in the pool, the layouts that read and write it, and where their parts lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gps_bench.checkpoints import dense_of_size
from shared.contracts.gps import PoolView
from shared.layout.parallel import cut_dimension, engine_layout
from shared.layout.sliced_storage import slice_layouts
from shared.layout.tensor_layout import Layout, Region, TensorSpec, whole, zero_layout
from shared.weights.host_pool import HostPool, lay_out
from shared.weights.mapped_pool import MappedPool, map_view
from shared.weights.stored_parts import sliced_tensors

Part = tuple[str, Region]
Bytes = NDArray[np.uint8]


def layouts_of(specs: Sequence[TensorSpec]) -> dict[str, Layout]:
    """TP1, TP2, TP4 of one replica; ZeRO over 2 and 4 ranks."""
    found = {f"TP{n}": engine_layout(specs, [[f"g{i}" for i in range(n)]]) for n in (1, 2, 4)}
    return found | {f"ZeRO-{n}": zero_layout(specs, [f"r{i}" for i in range(n)]) for n in (2, 4)}


@dataclass
class BenchModel:
    """A model of about `nbytes` stored twice: row-major, and slice by slice for some of `layouts`."""

    specs: list[TensorSpec]
    layouts: dict[str, Layout]
    host: HostPool
    plain: MappedPool
    sliced: MappedPool
    itemsize: int = 2

    @classmethod
    def make(cls, host: HostPool, nbytes: int) -> "BenchModel":
        specs = dense_of_size(nbytes)
        layouts = layouts_of(specs)
        tensors, size = lay_out([(s.name, s.dtype, s.shape) for s in specs])
        storages = slice_layouts(list(layouts.values()))
        views = [
            PoolView(
                path=str(host.create("policy", name, size).path), nbytes=size, tensors=tensors, sliced=cut
            )
            for name, cut in (("plain", ()), ("sliced", sliced_tensors(storages)))
        ]
        plain, sliced = (map_view(view, writable=True) for view in views)
        block = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
        for at in range(0, size, len(block)):
            part = plain.memory[at : at + len(block)]
            part[:] = block[: len(part)]
            block = np.roll(block, 12345)
        return cls(specs, layouts, host, plain, sliced)

    def slice_for(self, layout: str) -> None:
        """Store the second copy anew: registered with `layout` (TP4 for a ZeRO one) and both ZeRO layouts."""
        reader = layout if layout.startswith("TP") else "TP4"
        registered = [self.layouts[name] for name in (reader, "ZeRO-2", "ZeRO-4")]
        cut = sliced_tensors(slice_layouts(registered))
        view = self.sliced.view.model_copy(update={"sliced": cut})
        self.sliced = MappedPool(view, self.sliced.memory, writable=True)
        for spec in self.specs:
            self.sliced.copy_in(spec.name, whole(spec), self.plain.raw(spec.name))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def parts(self, layout: str, *, columns: bool | None = None) -> list[Part]:
        """Every part of every rank; with `columns`, only those that are (not) a range of columns."""
        found = [(p.tensor, p.region) for p in self.layouts[layout].placements]
        if columns is None:
            return found
        is_cut = {n: layout.startswith("TP") and layout != "TP1" and cut_dimension(n) == 1 for n, _ in found}
        return [part for part in found if is_cut[part[0]] == columns]

    def nbytes_of(self, parts: Sequence[Part]) -> int:
        return sum(region.numel * self.itemsize for _, region in parts)

    def read(self, pool: MappedPool, parts: Sequence[Part], target: Bytes) -> None:
        """Copy `parts` out of the pool, one after another into `target`."""
        at = 0
        for name, region in parts:
            nbytes = region.numel * self.itemsize
            pool.copy_out(name, region, target[at : at + nbytes])
            at += nbytes

    def write(self, pool: MappedPool, parts: Sequence[Part], source: Bytes) -> None:
        """Copy `source`, where `parts` lie one after another, into the pool."""
        at = 0
        for name, region in parts:
            nbytes = region.numel * self.itemsize
            pool.copy_in(name, region, source[at : at + nbytes])
            at += nbytes

    def check(self, scratch: Bytes) -> None:
        """Both storages give the same bytes for every part, and take them back bit-exact."""
        for layout in self.layouts:
            self.slice_for(layout)
            parts = self.parts(layout)
            for name, region in parts:
                size = region.numel * self.itemsize
                self.plain.copy_out(name, region, scratch[:size])
                self.sliced.copy_out(name, region, scratch[size : 2 * size])
                assert np.array_equal(scratch[:size], scratch[size : 2 * size]), (layout, name)
            for spec in self.specs:
                mine = [part for part in parts if part[0] == spec.name]
                size = self.nbytes_of(mine)
                self.read(self.plain, mine, scratch[:size])
                self.sliced.raw(spec.name)[:] = 0
                self.write(self.sliced, mine, scratch[:size])
                self.sliced.copy_out(spec.name, whole(spec), scratch[size : size + spec.nbytes])
                got = scratch[size : size + spec.nbytes]
                assert np.array_equal(got, self.plain.raw(spec.name)), (layout, spec.name)
