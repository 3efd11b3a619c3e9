"""What a simulated run takes and gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.ids import Role
from shared.planning.config import PlannerConfig
from shared.planning.plan import PlanRecord
from shared.scheduling.streaming import Streaming
from shared.scheduling.throughput import ThroughputModel
from shared.sim.cluster import EngineModel, Usage
from shared.sim.faults import Faults
from shared.sim.modes import Mode
from shared.sim.scenarios import Scenario, Shares
from shared.sim.workload import Sample

if TYPE_CHECKING:
    from shared.sim.driver import Simulation

GENERATING = (Role.ROLLOUT, Role.REWARD)


@dataclass(frozen=True, slots=True)
class Options:
    """What can be varied about a run without changing what is run."""

    num_steps: int = 10
    warmup_steps: int = 3
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """Window, hysteresis and the like; models and shift times come from the scenario."""
    planning_models: Mapping[Role, ThroughputModel] = field(default_factory=dict)
    """What the planner and schedulers believe, where it is not what engines do."""
    streaming: Streaming | None = None
    """Train on complete groups while the others of a batch finish; None is whole batches. They are trained
    whole in any case by synchronous modes, and where training leaves no room for both roles."""
    timer: Callable[[], float] | None = None
    """Seconds of a real clock, to measure decisions; None leaves them out."""
    faults: Faults = field(default_factory=Faults)
    on_event: Callable[["Simulation"], None] | None = None
    """Called after each event, to check invariants."""


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Devices of each role from a moment on, and tokens generated until then."""

    at_s: float
    rollout_devices: int
    reward_devices: int
    is_training: bool
    rollout_tokens: float
    reward_tokens: float


@dataclass(frozen=True, slots=True)
class Account:
    """Everything counted until a moment."""

    at_s: float
    usage: Mapping[Role, Usage]
    training_active_s: float
    training_holds_s: float
    shifting_device_s: float
    num_shifts: int
    num_trained: int


@dataclass(slots=True)
class RunResult:
    """A finished run, for `report`."""

    scenario: Scenario
    mode: Mode
    shares: Shares
    seed: int
    options: Options
    start: Account
    end: Account
    engines: Mapping[Role, EngineModel]
    trained: list[Sample]
    """Samples of the measured steps."""
    step_ends_s: list[float]
    timeline: list[TimelinePoint]
    decide_ms: list[float]
    plans: list[PlanRecord]
    max_staleness: int
    num_events: int
    num_moves: int
    """Sequences stopped to run elsewhere, for whatever reason."""
    num_deaths: int
    num_failed_shifts: int
    streaming: Streaming | None
    """As it was in force."""
