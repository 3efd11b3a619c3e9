"""This node's regions as the transport knows them.

A region that was given up stays mapped for a while: a copy that was cancelled may still be written into it,
and a peer that was told to stop may still read from it. Unmapped memory would end the process.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.weights.peer_links import PeerLinks
from shared.weights.ports import memory_of

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Regions:
    """Memory is kept for `grace_s` after it was given up."""

    links: PeerLinks
    now_s: Callable[[], float]
    grace_s: float
    _registered: dict[str, Bytes] = field(default_factory=dict)
    _retired: list[tuple[float, Bytes]] = field(default_factory=list)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    async def follow(self, wanted: Callable[[], Mapping[str, Bytes]]) -> None:
        """Register exactly the `wanted` regions (path → memory) that there are by then; what stays is not
        touched."""
        async with self._lock:
            found = wanted()
            for path in [path for path in self._registered if found.get(path) is not self._registered[path]]:
                self.retire(self._registered.pop(path))
                await self.links.unregister(Path(path).name)
            for path, memory in found.items():
                if path not in self._registered and memory.nbytes:
                    await self.links.register(Path(path).name, memory_of(memory, path))
                    self._registered[path] = memory
        self.let_go()

    def retire(self, memory: Bytes) -> None:
        """Keep the pages of a region whose file is gone."""
        self._retired.append((self.now_s() + self.grace_s, memory))

    def let_go(self) -> None:
        """Free what was given up long ago."""
        now_s = self.now_s()
        self._retired = [(until_s, memory) for until_s, memory in self._retired if until_s > now_s]
