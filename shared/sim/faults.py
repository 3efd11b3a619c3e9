"""What goes wrong in a run, drawn from a seed: deaths, failed and late shifts, late and repeated messages."""

import random
from dataclasses import dataclass

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates of what goes wrong; all zero is a run without faults."""

    seed: int = 0
    deaths_per_s: float = 0.0
    """Of any one awake replica, over the cluster."""
    node_deaths_per_s: float = 0.0
    """Of all replicas on one node of `devices_per_node` devices at once."""
    devices_per_node: int = 8
    restart_s: float = 20.0
    """Until a dead replica, if it still holds its devices, takes sequences again."""
    failed_shifts: float = 0.0
    """Share of shifts whose up-half fails: its devices stay free."""
    late_shifts: float = 0.0
    """Share of shifts that take `late_s` longer."""
    late_s: float = 30.0
    late_messages: float = 0.0
    """Share of reports that arrive up to `message_delay_s` late, overtaken by others."""
    repeated_messages: float = 0.0
    """Share of reports that arrive twice."""
    message_delay_s: float = 3.0

    def __post_init__(self) -> None:
        for name in ("failed_shifts", "late_shifts", "late_messages", "repeated_messages"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(name, getattr(self, name), "is a share", "Give 0 to 1")
        if self.failed_shifts >= 1.0:
            raise ConfigError("failed_shifts", self.failed_shifts, "no shift would ever end", "Lower it")


class FaultDraws:
    """The faults of one run, in the order they are asked for."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._rng = random.Random(f"faults/{faults.seed}")

    def next_s(self, rate_per_s: float) -> float:
        """Seconds to the next one of that rate."""
        return self._rng.expovariate(rate_per_s)

    def happens(self, share: float) -> bool:
        return share > 0.0 and self._rng.random() < share

    def below(self, count: int) -> int:
        """A number of 0..count-1."""
        return self._rng.randrange(count)

    def deliveries_s(self) -> list[float]:
        """Delays with which a report arrives: one, or two for a repeated one."""
        faults = self.faults
        delays = [self._delay_s()]
        if self.happens(faults.repeated_messages):
            delays.append(self._delay_s())
        return delays

    def _delay_s(self) -> float:
        late = self.happens(self.faults.late_messages)
        return self._rng.uniform(0.0, self.faults.message_delay_s) if late else 0.0
