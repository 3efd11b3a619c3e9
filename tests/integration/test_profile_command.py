"""`pivotrl profile` on a real engine: what it writes is what a run's planner then uses."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from services.planner.app import planner_config_of
from shared.ids import Role
from shared.planning.profile import Profile
from shared.runtime.config import load_config
from shared.runtime.profiles import profile_path
from shared.runtime.run_folder import RunFolder
from tests.support.tiny_model import TinySpec, write_model

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run of two tiny models."""
    models = {}
    for role, family in (("policy", "qwen2"), ("genrm", "llama")):
        (tmp_path / role).mkdir()
        model = write_model(TinySpec(family=family, dtype="bfloat16"), tmp_path / role)
        (model / "tokenizer_config.json").write_text("{}")
        models[role] = str(model)
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "run": {"folder": str(tmp_path / "runs" / "one")},
                "models": models,
                "cluster": {"devices": 1, "kv_tokens": 8192},
                "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 16},
                "reward": {"max_new_tokens": 16},
            }
        )
    )
    return file


def test_the_planner_uses_what_was_measured(file: Path) -> None:
    command = [sys.executable, "-m", "shared.cli.main", "profile", str(file), "--role", "rollout"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    config = load_config(file)
    folder = RunFolder(config.run.folder)
    path = profile_path(config, Role.ROLLOUT, folder)
    assert str(path) in done.stdout
    profile = Profile.from_json(path.read_text(), str(path))
    assert profile.num_points >= 12
    assert 0 < profile.prefill_s_per_token < 0.1
    assert profile.model.latency_s(8, 8 * 100) > 0
    planning = planner_config_of(config, folder)
    assert planning.rollout.throughput_model == profile.model
    assert planning.rollout.prefill_s_per_token == profile.prefill_s_per_token
    assert planning.reward.min_gain_share == 0, "the GenRM was not profiled"
    assert not list(Path("/dev/shm").glob("pivotrl-profile*")), "the pool of weights is gone"


def test_an_interruption_leaves_no_engine_and_no_weights(file: Path) -> None:
    def heed() -> None:  # a job in the background has inherited that it ignores interruptions
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-m", "shared.cli.main", "profile", str(file), "--role", "rollout"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed
    ) as process:
        assert process.stdout is not None
        while not list(Path("/dev/shm").glob("pivotrl-profile*")):  # until it loads the weights
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        engines = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert engines
    assert process.returncode != 0
    assert not [engine for engine in engines if engine.is_running()]
    assert not list(Path("/dev/shm").glob("pivotrl-profile*"))
    assert not list(file.parent.glob("runs/profiles/*"))
