"""Training on the prompts of a batch that are complete, while the others finish.

The step still ends with the whole batch, so staleness is what it is without. Three ways pay, and which one
does depends on how many devices training takes (`docs/results`, simulated cluster):

    eager    as soon as a few prompts are complete, devices kept until the step ends: training on few devices,
             which it is busy with nearly all the time
    bursts   whenever a good part is complete, devices lent to rollout and reward in between: training that is
             busy with its devices for most of the time
    late     when half of the batch is complete and little is left to generate: training on most devices, for
             the short time in which replicas would run nearly empty
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from shared.errors import ConfigError

StreamingName = Literal["off", "eager", "bursts", "late"]


@dataclass(frozen=True, slots=True)
class Streaming:
    """Shares are of a batch's prompts, above 0 and at most 1."""

    start_share: float
    """Training that shares devices begins with so many complete prompts."""
    rest_per_replica: float = inf
    """Devices shift to training for a part of a batch only when at most so many sequences are left for each
    reward replica that fits beside it."""
    min_share: float = 0.05
    """Once training has begun, and where it has devices of its own: fewer are not trained at once, unless
    they are the batch's last."""
    lends: bool = False
    """Between the parts of a batch other roles may have training's devices; its gradients are offloaded."""

    def __post_init__(self) -> None:
        for name in ("start_share", "min_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(name, getattr(self, name), "is a share above 0", "Give at most 1")

    def is_ready(self, num_complete: int, num_trained: int, num_prompts: int, *, is_dedicated: bool) -> bool:
        """Whether `num_complete` prompts, not trained yet, of a batch of `num_prompts` are to be trained now.

        >>> EAGER.is_ready(2, 0, 64, is_dedicated=False), EAGER.is_ready(2, 62, 64, is_dedicated=False)
        (False, True)
        """
        if num_complete == 0:
            return False
        if num_complete + num_trained == num_prompts:
            return True
        has_begun = is_dedicated or num_trained > 0
        return num_complete >= (self.min_share if has_begun else self.start_share) * num_prompts


EAGER = Streaming(0.05)
BURSTS = Streaming(0.15, min_share=0.15, lends=True)
LATE = Streaming(0.5, rest_per_replica=40.0)
STREAMING: Mapping[StreamingName, Streaming | None] = {
    "off": None,
    "eager": EAGER,
    "bursts": BURSTS,
    "late": LATE,
}
