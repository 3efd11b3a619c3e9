"""What can be set about planning."""

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from shared.errors import ConfigError
from shared.ids import Role
from shared.scheduling.throughput import ThroughputModel

PolicyName = Literal[
    "pivot", "disaggregated", "colocated", "rollout_reward_colocated", "static", "rule_based"
]


@dataclass(frozen=True, slots=True)
class RolePlanning:
    """What the planner assumes of rollout or reward."""

    throughput_model: ThroughputModel | None = None
    """None: a busy replica counts 1 token/s."""
    kv_capacity_tokens: int = 1 << 30
    """KV tokens of a replica that is not active yet."""
    prefill_s_per_token: float = 0.0
    """Seconds a replica stands still for each token of a sequence that comes to it from another one. The
    paper leaves this out of the cost of a shift (0)."""
    min_gain_share: float = 0.0
    """As the role's scheduler has it (`SchedulerConfig`)."""
    growth_tokens: int = 512
    """KV room set aside per sequence; the scheduler's margin, at most the longest response."""
    min_replicas: int = 0
    """Shifts between rollout and reward leave at least as many. Training takes its devices regardless."""
    max_replicas: int | None = None
    """Never more than this; None for all slots."""
    shift_up_s: float = 3.0
    """Assumed until measured."""
    shift_down_s: float = 2.0
    """Assumed until measured."""

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                "max_replicas", self.max_replicas, f"is below min_replicas = {self.min_replicas}", "Raise it"
            )


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Settings of every policy; most matter to `pivot` only."""

    policy: PolicyName = "pivot"
    rollout: RolePlanning = field(default_factory=RolePlanning)
    reward: RolePlanning = field(default_factory=RolePlanning)
    training_shift_up_s: float = 3.0
    """Assumed until measured."""
    training_shift_down_s: float = 2.0
    """Assumed until measured."""
    window_s: float = 60.0
    """H: how long the gain of a shift is expected to last."""
    measured_shift_weight: float = 0.3
    """Weight of the latest measured shift in the moving average; 0 keeps the assumed seconds."""
    length_aware: bool = False
    """Weigh a role's sequences by the mean tokens that its finished ones have generated. The paper counts
    them alike, so that 100 short responses press as hard as 100 long verdicts."""
    upstream_weight: float = 0.0
    """With `length_aware`, also count this much of the verdicts that samples still in rollout will need, so
    that reward keeps devices for what is about to come. The paper counts what is there (0)."""
    wait_for_version: bool = False
    """Leave devices as they are from the end of a training step until its version is published: the prompts
    that come with it decide who needs training's devices."""
    payback_guard: bool = True
    """A shift that cost tokens is not reversed, at a further cost, before it has earned them back."""
    cooldown_s: float = 0.0
    """Least time from a completed shift to the next one between rollout and reward."""
    max_evaluated: int = 48
    """Replay at most this many candidates, the most promising first; fewer are enough nearly always."""
    bound_slack: float = 0.0
    """Share of the present throughput that a candidate may have above what the judged ones beside it promise.
    Throughput does not always grow with replicas: 0.005 found all that 0 missed at 128 devices."""
    exact: bool = False
    """Judge every candidate. Without, those between two judged ones are passed over where throughput that
    grows with a role's replicas could not make them the best; it nearly always does."""
    use_throughput_model: bool = True
    """Off is the ablation where a busy replica counts 1 token/s."""
    migration: bool = True
    """Off is the ablation where a new replica only gets what waits."""
    kv_use_high: float = 0.8
    """`rule_based`: a role over this share of its KV capacity shifts up."""
    kv_use_low: float = 0.1
    """`rule_based`: a role under this share gives a replica."""
    training_rest_per_replica: float = inf
    """`pivot`, where training begins with a part of a batch: it is given devices for that only when at most
    so many sequences are left for each reward replica that fits beside it; for a whole batch, always."""

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            raise ConfigError("window_s", self.window_s, "must be positive", "60 is the paper's choice")
        if not 0 <= self.measured_shift_weight <= 1:
            raise ConfigError(
                "measured_shift_weight", self.measured_shift_weight, "must be in 0..1", "Try 0.3"
            )
        if self.bound_slack < 0:
            raise ConfigError("bound_slack", self.bound_slack, "must not be negative", "Try 0.005")
        if self.max_evaluated < 2:
            raise ConfigError("max_evaluated", self.max_evaluated, "must be at least 2", "48 is a good start")
        if not 0 <= self.kv_use_low < self.kv_use_high:
            raise ConfigError(
                "kv_use_low", self.kv_use_low, f"must be below kv_use_high = {self.kv_use_high}", "Lower it"
            )
        if not self.training_rest_per_replica >= 0:
            raise ConfigError(
                "training_rest_per_replica", self.training_rest_per_replica, "must not be negative", "Try 40"
            )

    def of(self, role: Role) -> RolePlanning:
        """Rollout's or reward's part."""
        return self.rollout if role is Role.ROLLOUT else self.reward
