"""What a person wants to know of a transfer plan."""

from collections.abc import Mapping
from dataclasses import dataclass

_LINKS_SHOWN = 16


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in figures. `balance` is mean / largest sender load: 1.0 is perfect. `str()` is for
    a terminal."""

    plan_id: str
    num_transfers: int
    total_bytes: int
    bytes_per_link: Mapping[tuple[str, str], int]
    load_s_per_sender: Mapping[str, float]
    makespan_s: float
    lower_bound_s: float
    balance: float

    def __str__(self) -> str:
        over = self.makespan_s / self.lower_bound_s if self.lower_bound_s else 1.0
        head = (
            f"plan {self.plan_id}: {self.num_transfers} transfers, {_size(self.total_bytes)}, makespan "
            f"{self.makespan_s:.4g} s = {over:.3f} x the bound of {self.lower_bound_s:.4g} s, "
            f"balance {self.balance:.3f}"
        )
        links = sorted(self.bytes_per_link.items(), key=lambda item: (-item[1], item[0]))
        lines = [f"  {sender} -> {receiver}: {_size(n)}" for (sender, receiver), n in links[:_LINKS_SHOWN]]
        more = [f"  and {len(links) - _LINKS_SHOWN} links more"] if len(links) > _LINKS_SHOWN else []
        return "\n".join([head, *lines, *more])


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 10_000_000 else f"{nbytes} bytes"
