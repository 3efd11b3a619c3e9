"""A model in shared memory twice: row-major, and in slices as parameter storage keeps it for engines of two
devices and two training ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from services.gps.layouts import UNCUT, Usage
from shared.contracts.gps import PoolView
from shared.weights.mapped_pool import PREFIX, SHM_FOLDER
from tests.support.stored_pools import store_for
from tests.support.tiny_model import TinySpec, write_random_pool

USAGE = Usage(num_readers=2, num_writers=2)
STORAGES = {"row-major": UNCUT, "sliced": USAGE}


@contextmanager
def stored_twice(spec: TinySpec, shape: str) -> Iterator[dict[str, PoolView]]:
    """The pools of both storages, in files whose names parameter storage could have given."""
    paths = {name: SHM_FOLDER / f"{PREFIX}gps-reads-{os.getpid()}-{shape}-{name}" for name in STORAGES}
    try:
        plain = write_random_pool(spec, paths["row-major"])
        yield {"row-major": plain, "sliced": store_for(USAGE, plain, paths["sliced"])}
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)
