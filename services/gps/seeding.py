"""How the models of a node that holds everything begin: from Hugging Face folders, or as an earlier life left
them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.gps.adoption import adopt_region
from services.gps.boxes import spec_of
from services.gps.layouts import UNCUT, Usage
from services.gps.manifest import Manifest
from services.gps.packing import Storages
from services.gps.store import Store
from services.gps.versions import version_checksum
from shared.weights.host_pool import PoolRegion
from shared.weights.seed import SeedPlan, load_seed, plan_seed

BecameReadable = Callable[[str, str], Awaitable[None]]
"""Told the model and where its version came from."""
_log = logging.getLogger("pivotrl.gps")


@dataclass(frozen=True, slots=True)
class Seed:
    """A model to begin with: from `folder`, kept in `dtype`. Nobody writes a frozen one.

    `usage` decides how it is stored; without it, row-major.
    """

    model: str
    folder: Path
    dtype: str
    is_frozen: bool
    usage: Usage = UNCUT


@dataclass(frozen=True, slots=True)
class _Planned:
    seed: Seed
    plan: SeedPlan
    storages: Storages


class Seeding:
    """Fills `store`; tells `became_readable` about each model once it holds a version."""

    def __init__(self, store: Store, manifest: Manifest | None, became_readable: BecameReadable) -> None:
        self._store, self._manifest, self._became_readable = store, manifest, became_readable
        self.waits_for: str | None = "models to be seeded"
        """None once all models are readable."""

    async def seed_all(self, seeds: Sequence[Seed]) -> None:
        """All buffers are reserved before the first byte is read, so that what cannot fit fails at once.

        Raises ConfigError: a folder is no checkpoint, or buffers do not fit.
        """
        to_load: list[tuple[_Planned, PoolRegion]] = []
        for seed in seeds:
            self.waits_for = f"room for {seed.model}"
            planned = await asyncio.to_thread(_planned, seed)
            if not await self._adopt(planned):
                region = await asyncio.to_thread(self._add, planned)
                to_load.append((planned, region))
        for planned, region in to_load:
            seed, plan = planned.seed, planned.plan
            self.waits_for = f"{seed.model} to be read from {seed.folder}"
            await asyncio.to_thread(load_seed, plan, region.memory, planned.storages)
            checksum = await asyncio.to_thread(
                version_checksum, plan.tensors, region.memory, planned.storages
            )
            self._store.publish_seed(seed.model, 0, checksum)
            await self._became_readable(seed.model, str(seed.folder))
        self.waits_for = None

    def _add(self, planned: _Planned, adopted: PoolRegion | None = None, num_regions: int = 0) -> PoolRegion:
        seed, plan = planned.seed, planned.plan
        return self._store.add_model(
            seed.model,
            plan.tensors,
            plan.nbytes,
            is_frozen=seed.is_frozen,
            adopted=adopted,
            num_regions=num_regions,
            storages=planned.storages,
        )

    async def _adopt(self, planned: _Planned) -> bool:
        """Whether the manifest's region of the model is there, of the same tensors, and undamaged."""
        model, plan = planned.seed.model, planned.plan
        entry = self._manifest.entry(model) if self._manifest else None
        if entry is None:
            return False
        region = await asyncio.to_thread(
            adopt_region, self._store.pool, entry, plan.tensors, plan.nbytes, planned.storages
        )
        if region is None:
            return False
        self._add(planned, region, entry.num_regions)
        self._store.publish_seed(model, entry.version, entry.checksum)
        _log.info("%s version %d found in the pool", model, entry.version)
        await self._became_readable(model, "pool")
        return True


def _planned(seed: Seed) -> _Planned:
    plan = plan_seed(seed.folder, seed.dtype)
    return _Planned(seed, plan, seed.usage.storages([spec_of(tensor) for tensor in plan.tensors]))
