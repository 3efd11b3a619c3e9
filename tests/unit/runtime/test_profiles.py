"""Where a role's constants come from: its profile, or what is built in."""

import json
from pathlib import Path

import pytest

from services.planner.app import planner_config_of
from shared.errors import ConfigError
from shared.ids import Role
from shared.planning.profile import Profile
from shared.runtime.config import RunConfig
from shared.runtime.profiles import MIN_GAIN_SHARE, experts_of, profile_path, throughput_of
from shared.runtime.run_folder import RunFolder
from shared.scheduling.throughput import CPU_SMOLLM2_135M, ThroughputModel

MODEL = ThroughputModel(1e-6, 2e-3, 3e-4, 4e-3)


def config_of(tmp_path: Path, **cluster: object) -> RunConfig:
    for name, layers in (("p", 2), ("g", 4)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    models = {"policy": str(tmp_path / "p"), "genrm": str(tmp_path / "g")}
    return RunConfig.model_validate({"models": models, "cluster": {"devices": 8, **cluster}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "one")


def write_profile(config: RunConfig, role: Role, folder: RunFolder) -> Path:
    path = profile_path(config, role, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Profile(MODEL, 5e-4, 0.01, 0.02, 27).to_json())
    return path


def test_without_a_profile_constants_are_built_in_and_what_needs_their_scale_is_off(
    tmp_path: Path, folder: RunFolder
) -> None:
    config = config_of(tmp_path)
    found = throughput_of(config, Role.ROLLOUT, folder)
    assert (found.model, found.prefill_s_per_token, found.min_gain_share) == (CPU_SMOLLM2_135M, 0.0, 0.0)
    planning = planner_config_of(config, folder)
    assert planning.rollout.throughput_model == CPU_SMOLLM2_135M
    assert planning.reward.min_gain_share == 0.0


def test_a_profile_is_used_by_its_role_in_every_run_beside_it(tmp_path: Path, folder: RunFolder) -> None:
    config = config_of(tmp_path)
    path = write_profile(config, Role.REWARD, folder)
    other = RunFolder(folder.path.parent / "two")
    found = throughput_of(config, Role.REWARD, other)
    assert (found.model, found.prefill_s_per_token, found.source) == (MODEL, 5e-4, str(path))
    assert found.min_gain_share == MIN_GAIN_SHARE
    planning = planner_config_of(config, other)
    assert (planning.reward.throughput_model, planning.reward.prefill_s_per_token) == (MODEL, 5e-4)
    assert planning.reward.min_gain_share == MIN_GAIN_SHARE
    assert planning.rollout.throughput_model == CPU_SMOLLM2_135M


def test_a_profile_is_not_used_for_another_model_or_parallelism(tmp_path: Path, folder: RunFolder) -> None:
    config = config_of(tmp_path)
    paths = {
        profile_path(config, Role.ROLLOUT, folder),
        profile_path(config, Role.REWARD, folder),
        profile_path(config_of(tmp_path, kind="cuda"), Role.REWARD, folder),
        profile_path(
            config_of(tmp_path, kind="cuda", reward_tp=2, split={"rollout": 2, "reward": 4, "training": 2}),
            Role.REWARD,
            folder,
        ),
    }
    assert len(paths) == 4
    (tmp_path / "g" / "config.json").write_text(json.dumps({"num_hidden_layers": 5}))
    assert profile_path(config, Role.REWARD, folder) not in paths


def test_a_profile_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, folder: RunFolder) -> None:
    config = config_of(tmp_path)
    path = write_profile(config, Role.ROLLOUT, folder)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no profile") as raised:
        throughput_of(config, Role.ROLLOUT, folder)
    assert str(path) in raised.value.message


@pytest.mark.parametrize(
    ("values", "experts"),
    [
        ({}, (0, 0)),
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"text_config": {"n_routed_experts": 64, "num_experts_per_tok": 4}}, (64, 4)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
    ],
)
def test_experts_are_those_of_the_models_configuration(
    tmp_path: Path, values: dict[str, object], experts: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert experts_of(tmp_path) == experts
