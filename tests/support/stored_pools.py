"""Pool files stored as parameter storage would store them for the layouts of a run."""

from pathlib import Path

from services.gps.boxes import spec_of
from services.gps.layouts import Usage
from services.gps.packing import Packing, pack_whole
from shared.contracts.gps import PoolView
from shared.layout.tensor_layout import index_specs, whole
from shared.weights.mapped_pool import map_view


def packing_of(view: PoolView, usage: Usage) -> Packing:
    """How the whole model of `view` is stored for `usage`."""
    specs = index_specs(spec_of(tensor) for tensor in view.tensors)
    return pack_whole(specs, usage.storages(list(specs.values())))


def store_for(usage: Usage, view: PoolView, path: Path) -> PoolView:
    """The values of the pool `view` once more, in a file at `path` that is stored for `usage`."""
    packing = packing_of(view, usage)
    with path.open("wb") as file:
        file.truncate(packing.nbytes)
    source = map_view(view, folder=None)
    stored = map_view(packing.view(str(path)), writable=True, folder=None)
    for name, spec in packing.specs.items():
        stored.copy_in(name, whole(spec), source.raw(name))
    return stored.view
