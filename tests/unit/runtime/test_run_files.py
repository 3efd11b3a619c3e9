"""Checkpoints, the run folder, and the topology of every policy."""

import json
import os
from pathlib import Path

import pytest

from shared.errors import ConfigError, NotFound
from shared.ids import Role
from shared.planning.policies import Split, initial_allocation
from shared.runtime.checkpoints import KEEP, Checkpoint, Checkpoints
from shared.runtime.config import Policy, RunConfig
from shared.runtime.run_folder import SERVICES, RunFolder, choose_endpoints
from shared.runtime.topology import cluster_of, rank_devices


def config(**values: object) -> RunConfig:
    return RunConfig.model_validate({"models": {"policy": "p", "genrm": "g"}, **values})


# Checkpoints


def test_a_fresh_run_starts_at_step_0(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).latest() == Checkpoint(0, "")


def save(checkpoints: Checkpoints, folder: Path, step: int) -> None:
    tag = checkpoints.tag(step)
    (folder / tag).mkdir(exist_ok=True)
    (folder / tag / "shard").write_text("x")
    checkpoints.commit(Checkpoint(step, tag))


def test_the_newest_are_kept_and_the_latest_is_one_of_them(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 6):
        save(checkpoints, tmp_path, step)
        assert checkpoints.latest() == Checkpoint(step, f"step-{step:06d}")
        tags = sorted(p.name for p in tmp_path.glob("step-*"))
        assert tags == [checkpoints.tag(s) for s in range(max(1, step - KEEP + 1), step + 1)]


def test_what_a_crash_left_of_later_steps_costs_no_committed_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, tmp_path, 1)
    for torn in (7, 8, 9):
        (tmp_path / checkpoints.tag(torn)).mkdir()
    save(checkpoints, tmp_path, 2)
    assert (tmp_path / checkpoints.latest().tag / "shard").exists()
    assert (tmp_path / checkpoints.tag(1)).exists()


# Run folder


@pytest.mark.parametrize("name", ["export", "a/b", "a/../b", "export/../export2"])
def test_names_under_the_folder_are_inside(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert folder.inside(name).is_relative_to(folder.path.resolve())


@pytest.mark.parametrize("name", ["..", "../other", "/etc/passwd", "a/../../x", "link/x", "", ".", "a/.."])
def test_names_outside_the_folder_or_the_folder_itself_are_refused(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="outside the run folder"):
        folder.inside(name)


def test_run_json_is_for_its_owner_only_and_reads_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with pytest.raises(NotFound, match="pivotrl up"):
        folder.read()
    wanted = config(network={"http_port": 0})
    endpoints = choose_endpoints(wanted, None)
    folder.write(wanted, endpoints)
    assert os.stat(folder.run_json).st_mode & 0o077 == 0
    assert folder.read() == (wanted, endpoints)


def test_tokens_of_an_earlier_start_are_kept(tmp_path: Path) -> None:
    first = choose_endpoints(config(), None)
    second = choose_endpoints(config(), first)
    assert (second.token, second.nats_token) == (first.token, first.nats_token)
    assert first.http_ports == {name: 8600 + i for i, name in enumerate(SERVICES)}
    free = choose_endpoints(config(network={"http_port": 0}), None).http_ports
    assert len(set(free.values())) == len(SERVICES)


def test_run_json_is_plain_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write(config(), choose_endpoints(config(), None))
    assert json.loads(folder.run_json.read_text())["config"]["policy"] == "pivot"


# Topology

SPLIT = {"rollout": 2, "reward": 1, "training": 1}


@pytest.mark.parametrize(
    ("policy", "rollout", "reward", "training"),
    [
        ("pivot", [0, 1, 2, 3], [0, 1, 2, 3], [3]),
        ("colocated", [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
        ("disaggregated", [0, 1], [2], [3]),
        ("rollout_reward_colocated", [0, 1, 2], [0, 1, 2], [3]),
        ("static", [0, 1, 2, 3], [0, 1, 2, 3], [3]),
        ("rule_based", [0, 1, 2, 3], [0, 1, 2, 3], [3]),
    ],
)
def test_each_policy_has_its_slots(
    policy: Policy, rollout: list[int], reward: list[int], training: list[int]
) -> None:
    made = config(policy=policy, cluster={"devices": 4, "split": SPLIT})
    cluster = cluster_of(made)
    for role, devices in ((Role.ROLLOUT, rollout), (Role.REWARD, reward)):
        assert [sorted(slot.devices) for slot in cluster.slots_of(role)] == [[d] for d in devices]
    assert rank_devices(made) == training
    split = Split(made.cluster.split.rollout, made.cluster.split.reward)
    initial_allocation(policy, cluster, split).validate(cluster)


def test_training_takes_every_device_where_nothing_else_is_said() -> None:
    assert rank_devices(config(cluster={"devices": 4})) == [0, 1, 2, 3]
    assert rank_devices(config(policy="disaggregated", cluster={"devices": 4})) == [2]


def test_tensor_parallel_slots_are_whole_and_disjoint() -> None:
    made = config(
        cluster={
            "kind": "cuda",
            "devices": 8,
            "rollout_tp": 2,
            "reward_tp": 4,
            "split": {"rollout": 2, "reward": 4},
        }
    )
    cluster = cluster_of(made)
    assert [sorted(s.devices) for s in cluster.slots_of(Role.ROLLOUT)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [sorted(s.devices) for s in cluster.slots_of(Role.REWARD)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_cpu_slots_are_added_where_a_split_needs_them() -> None:
    made = config(policy="disaggregated", cluster={"devices": 2, "split": SPLIT})
    assert made.num_devices == 4
    assert len(cluster_of(made).devices) == 4
