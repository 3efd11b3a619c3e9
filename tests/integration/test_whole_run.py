"""Whole runs with real engines: vLLM, DeepSpeed, NATS, shared memory; a tiny random model."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.runtime.audit import audit_folder
from shared.runtime.journal import read_journal
from shared.runtime.models import parameter_bytes
from tests.support.run_model import write_run_model
from tests.support.whole_run import WholeRun, is_alive, write_config

pytestmark = pytest.mark.engine
START_S = 240.0
PROMPTS_PER_STEP = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_model(tmp_path_factory.mktemp("model"))


def leftovers(name: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"pivotrl-{name}-*"))


def running(seen: dict[str, Any], role: str) -> int:
    return sum(len(replica["lengths"]) for replica in seen["workload"][role]["replicas"])


@pytest.mark.timeout(900)
def test_a_run_shifts_survives_a_kill_and_an_interruption_and_trains_every_sample_once(
    model: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, model, rollout={"samples_per_prompt": 4, "max_prompt_tokens": 128, "max_new_tokens": 384}
    )
    with WholeRun(config) as run:
        run.until(lambda seen: running(seen, "rollout") > 0, START_S, "rollout runs")
        victims = [r["replica_id"] for r in run.get("rollout", "/v1/replicas") if r["active"]]
        before = run.get("rollout", "/v1/queue")["finished_total"]
        killed = run.pids()[victims[0]]
        os.kill(killed, signal.SIGKILL)
        run.until(lambda seen: seen["workload"]["step"] >= 1, START_S, "step 1 after the kill")
        assert before < 16 * 3
        assert run.pids()[victims[0]] != killed
        pids = run.pids()
        started = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(15) == 130
        assert time.monotonic() - started < 10
        assert [name for name, pid in pids.items() if is_alive(pid)] == []
        assert leftovers(yaml.safe_load(config.read_text())["run"]["name"]) == []
    interrupted = audit_folder(run.folder / "journal", prompts_per_step=PROMPTS_PER_STEP)
    assert interrupted.is_clean
    assert interrupted.issued > interrupted.trained + interrupted.unscored

    with WholeRun(config) as run:
        assert run.wait(600) == 0, run.output()
    result = run.summary()
    audited = audit_folder(run.folder / "journal", prompts_per_step=PROMPTS_PER_STEP)
    assert audited.is_clean
    assert audited.resumes == 1
    assert (audited.issued, audited.in_flight) == (48, 0)
    assert result["steps"] == result["policy_version"] == 3
    samples = result["samples"]
    assert samples == {
        "issued": 48,
        "trained": audited.trained,
        "in_flight": 0,
        "unscored": audited.unscored,
        "lost": 0,
        "duplicated": 0,
    }
    assert audited.trained > 0
    issued = [entry["sample"] for entry in read_journal(run.folder / "journal" / "rollout.jsonl")]
    assert len(issued) == len(set(issued))
    for name in ("metrics.jsonl", "timeline.png", "timeline.json", "export/model.safetensors", "tensorboard"):
        assert (run.folder / name).exists(), name
    assert_exported_model_loads_and_differs(model, run.folder / "export")


def assert_exported_model_loads_and_differs(start: Path, export: Path) -> None:
    from transformers import AutoModelForCausalLM

    first, last = (AutoModelForCausalLM.from_pretrained(str(p)).state_dict() for p in (start, export))
    assert first.keys() == last.keys()
    assert any(not first[name].equal(last[name]) for name in first)


@pytest.mark.timeout(600)
def test_the_planner_moves_devices_to_reward_to_training_and_back(model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, training={"steps": 4, "prompts_per_step": 4, "staleness": 0})
    with WholeRun(config) as run:
        assert run.wait(500) == 0, run.output()
    result = run.summary()
    assert result["shifts"]["rollout_to_reward"] >= 1
    assert result["shifts"]["to_training"] >= 2
    assert result["shifts"]["from_training"] >= 1
    assert result["shifts"]["failed"] == 0
    assert result["policy_version"] == 4
    assert all(row["staleness_max"] == 0 for row in result["rows"])
    assert all(0 <= row["logprob_gap_mean"] < 0.1 for row in result["rows"])


@pytest.mark.timeout(600)
def test_two_nodes_of_one_machine_start_together_and_train_to_the_end(model: Path, tmp_path: Path) -> None:
    """Engines on node 0, the rank on node 1, parameter storage on both, which share one copy: every Read and
    every Write crosses the nodes."""
    addresses = ["127.0.0.1", "127.0.0.2"]
    config = write_config(
        tmp_path,
        model,
        policy="rollout_reward_colocated",
        rollout={"samples_per_prompt": 2, "max_new_tokens": 32},
        reward={"max_new_tokens": 32},
        gps={"nodes": addresses, "transport": "any", "node_bytes": 2 * parameter_bytes(model)},
        training={"steps": 2, "prompts_per_step": 2},
    )
    with WholeRun(config) as run:
        seen = run.until(lambda seen: seen["workload"]["step"] >= 1, START_S, "step 1")
        nodes = [run.get("gps", "/v1/nodes", host=address) for address in addresses]
        started = set(run.pids())
        assert run.wait(300) == 0, run.output()
    assert [(found["node"], found["group_size"]) for found in nodes] == [(0, 2), (1, 2)]
    assert started == {
        "supervisor",
        "nats",
        "gps",
        "gps-n1",
        *("monitor", "planner", "rollout", "reward", "trainer"),
        *("rollout-0", "reward-0", "rank-0"),
    }
    assert seen["workload"]["step"] in (1, 2)
    result = run.summary()
    assert result["steps"] == result["policy_version"] == 2
    assert audit_folder(run.folder / "journal", prompts_per_step=2).is_clean
    assert_exported_model_loads_and_differs(model, run.folder / "export")
    assert leftovers(yaml.safe_load(config.read_text())["run"]["name"]) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["disaggregated", "colocated"])
def test_the_baselines_run_from_the_same_file(model: Path, tmp_path: Path, policy: str) -> None:
    training = {"steps": 2, "prompts_per_step": 4, "streaming": "eager"}
    config = write_config(tmp_path, model, cluster={"split": {"training": 1}}, training=training)
    with WholeRun(config, "--set", f"policy={policy}") as run:
        assert run.wait(500) == 0, run.output()
    result = run.summary()
    assert (result["policy"], result["steps"]) == (policy, 2)
    shifts = result["shifts"]
    if policy == "disaggregated":
        assert sum(shifts.values()) == 0
        assert sum(row["num_parts"] for row in result["rows"]) > 2
    else:
        assert [row["num_parts"] for row in result["rows"]] == [1, 1]
        assert shifts["rollout_to_reward"] >= 1
        assert shifts["to_training"] >= 2
        assert all(row["staleness_max"] == 0 for row in result["rows"])
    assert audit_folder(run.folder / "journal", prompts_per_step=4).is_clean
