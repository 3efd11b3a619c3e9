"""What GPS needs to know that is not in the run's file."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.errors import ConfigError
from shared.layout.transfer_plan import Link
from shared.weights.host_pool import SHM_FOLDER

RESERVED_SHM_BYTES = 256 << 20
"""Left to others: torch workers, the engines' own message queues."""

LOCAL_LINK = Link(bandwidth_bytes_per_s=50e9, overhead_s=5e-6)
"""CPU to a GPU of the same node; PCIe 5 x16 with a pinned pool reaches 55 GB/s."""


@dataclass(frozen=True, slots=True)
class GpsSettings:
    """Raises ConfigError on a value that cannot work."""

    budget_bytes: int
    """Most shared memory of this node that the pool may take."""
    folder: Path = SHM_FOLDER
    max_lease_s: float = 600.0
    local: Link = LOCAL_LINK
    """Between this node's pool and its devices."""

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise ConfigError("gps.budget_bytes", self.budget_bytes, "leaves no room", "Free shared memory")
        if self.max_lease_s <= 0:
            raise ConfigError("gps.max_lease_s", self.max_lease_s, "must be positive", "Use 600")

    @classmethod
    def of_node(cls, folder: Path = SHM_FOLDER, kept: Collection[Path] = ()) -> Self:
        """All free shared memory of this node but a reserve, counting regions `kept` from an earlier life as
        free; `PIVOTRL_GPS_BYTES` sets another budget."""
        if chosen := os.environ.get("PIVOTRL_GPS_BYTES"):
            if not chosen.isdecimal():
                remedy = "For example 17179869184"
                raise ConfigError("PIVOTRL_GPS_BYTES", chosen, "is not a number of bytes", remedy)
            return cls(budget_bytes=int(chosen), folder=folder)
        status = os.statvfs(folder)
        own = sum(path.stat().st_size for path in kept if path.exists())
        return cls(budget_bytes=status.f_bavail * status.f_frsize + own - RESERVED_SHM_BYTES, folder=folder)
