"""Profiles on disk, and what a role's scheduler and the planner take from them.

A profile belongs to (model, parallelism, device kind). It lies beside the runs, so that all of them use it.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from shared.ids import Role
from shared.planning.profile import Profile
from shared.runtime.config import DTYPE, RunConfig
from shared.runtime.models import model_folder
from shared.runtime.run_folder import RunFolder
from shared.scheduling.throughput import CPU_SMOLLM2_135M, H200_7B_TP1, ThroughputModel

MIN_GAIN_SHARE = 0.25
"""Of admission, where there is a profile (ADR 9)."""


@dataclass(frozen=True, slots=True)
class RoleThroughput:
    """What scheduling and planning assume of a role's replicas."""

    model: ThroughputModel
    prefill_s_per_token: float = 0.0
    min_gain_share: float = 0.0
    source: str = "built in"


def throughput_of(config: RunConfig, role: Role, folder: RunFolder) -> RoleThroughput:
    """From the role's profile, if there is one. Without, built-in constants of another model: on CPU
    SmolLM2-135M on one core, on GPUs a dense 7B on one H200. They have the right shape, which is what
    comparing candidates needs, but not the scale that admission and the cost of prefill need; those stay off.

    Raises ConfigError: the profile cannot be read.
    """
    path = profile_path(config, role, folder)
    if path.is_file():
        profile = Profile.from_json(path.read_text(), str(path))
        return RoleThroughput(profile.model, profile.prefill_s_per_token, MIN_GAIN_SHARE, str(path))
    return RoleThroughput(CPU_SMOLLM2_135M if config.cluster.kind == "cpu" else H200_7B_TP1)


def profile_path(config: RunConfig, role: Role, folder: RunFolder) -> Path:
    """Where the profile of the role's model, as this run serves it, is or would be."""
    model = model_folder(model_spec(config, role), folder)
    architecture = (model / "config.json").read_bytes() if (model / "config.json").is_file() else b""
    digest = hashlib.sha256(architecture).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", model.name)
    tp = config.tensor_parallel(role)
    return folder.path.parent / "profiles" / f"{name}-{digest}-{config.cluster.kind}-tp{tp}-{DTYPE}.json"


def model_spec(config: RunConfig, role: Role) -> str:
    """The role's model, as the run's file names it."""
    return config.models.policy if role is Role.ROLLOUT else config.models.genrm


def experts_of(model: Path) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token goes to; zeros for a dense model."""
    values = json.loads((model / "config.json").read_text())
    values = values.get("text_config", values)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if values.get(name):
            return int(values[name]), int(values["num_experts_per_tok"])
    return 0, 0
