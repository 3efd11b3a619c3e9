"""Which processes a launcher starts on which node, and what each is told."""

from pathlib import Path
from typing import Any

import pytest

from shared.cli import main as cli
from shared.cli.local_run import endpoints_for
from shared.cli.processes import node_specs, process_specs
from shared.cli.tables import placement_table
from shared.errors import ConfigError
from shared.runtime.config import RunConfig, load_config
from shared.runtime.nodes import machine_of
from shared.runtime.run_folder import SERVICES, RunFolder, choose_endpoints
from shared.runtime.supervisor import ProcessSpec

LOOPBACK, MACHINES = ["127.0.0.1", "127.0.0.2"], ["10.0.0.1", "10.0.0.2"]
NODE_0 = {"nats", "monitor", "gps", "planner", "rollout", "reward", "trainer", "rollout-0", "reward-0"}
NODE_1 = {"gps-n1", "rank-0", "rank-1"}
REMOTE = {"nats_url": "nats://10.0.0.1:4222", "token": "t"}


def config_of(
    tmp_path: Path, nodes: list[str] | None, *, kind: str = "cpu", network: Any = None, **more: Any
) -> RunConfig:
    """Two engines on the first half of four devices, two ranks on the other."""
    values = {
        "policy": "disaggregated",
        "run": {"folder": str(tmp_path / "run")},
        "models": {"policy": "p", "genrm": "g"},
        "cluster": {"kind": kind, "devices": 4, "split": {"rollout": 1, "reward": 1, "training": 2}},
        "network": network or {},
        "gps": {"nodes": nodes} if nodes else None,
        **more,
    }
    return RunConfig.model_validate(values)


def started(config: RunConfig, node: int | None) -> dict[str, ProcessSpec]:
    folder = RunFolder(config.run.folder)
    folder.create()
    folder.nats.mkdir(exist_ok=True)
    specs = process_specs(config, folder, choose_endpoints(config, None), machine_of(config, node))
    assert len({spec.name for spec in specs}) == len(specs)
    return {spec.name: spec for spec in specs}


def option(spec: ProcessSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_without_several_nodes_everything_is_started(tmp_path: Path) -> None:
    specs = started(config_of(tmp_path, None), None)
    assert set(specs) == (NODE_0 | NODE_1) - {"gps-n1"}
    assert {option(spec, "--node") for name, spec in specs.items() if name != "nats"} == {"0"}


def test_all_nodes_of_one_machine_are_started_together_each_told_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, LOOPBACK, kind="cuda")
    specs = started(config, None)
    assert set(specs) == NODE_0 | NODE_1
    for names, node in ((NODE_0 - {"nats"}, "0"), (NODE_1, "1")):
        assert {option(specs[name], "--node") for name in names} == {node}
    assert specs["gps-n1"].ready_file == config.run.folder / "processes" / "gps-n1.json"
    assert specs["rank-1"].ready_file == config.run.folder / "processes" / "rank-1-n1.json"
    visible = {name: dict(spec.env).get("CUDA_VISIBLE_DEVICES") for name, spec in specs.items()}
    assert (visible["rollout-0"], visible["reward-0"]) == ("0", "1")
    assert (visible["rank-0"], visible["rank-1"]) == ("2", "3")


def test_a_part_of_one_machine_keeps_the_devices_of_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, LOOPBACK, kind="cuda")
    assert set(started(config, 0)) == NODE_0
    second = started(config, 1)
    assert set(second) == NODE_1
    assert dict(second["rank-0"].env)["CUDA_VISIBLE_DEVICES"] == "2"


def test_of_several_machines_each_starts_its_node_and_counts_its_own_devices(tmp_path: Path) -> None:
    config = config_of(tmp_path, MACHINES, kind="cuda", network=REMOTE)
    assert set(started(config, 0)) == NODE_0 - {"nats"}
    second = started(config, 1)
    assert set(second) == NODE_1
    assert [dict(second[f"rank-{r}"].env)["CUDA_VISIBLE_DEVICES"] for r in (0, 1)] == ["0", "1"]


def test_the_supervisor_of_a_node_starts_its_replicas_and_ranks_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, MACHINES, network=REMOTE)
    folder = RunFolder(config.run.folder)
    names = [{s.name for s in node_specs(config, folder, machine_of(config, node))} for node in (0, 1)]
    assert names == [{"rollout-0", "reward-0"}, {"rank-0", "rank-1"}]


@pytest.mark.parametrize(
    ("changed", "node", "told"),
    [
        ({"nodes": MACHINES}, None, "--node 0 on the first"),
        ({"nodes": MACHINES}, 2, "Use 0 to 1"),
        ({"nodes": None}, 1, "none of the 1 nodes"),
        ({"nodes": [*LOOPBACK, "127.0.0.3"]}, None, r"cluster\.devices = 4: cannot be shared out evenly"),
        (
            {"nodes": MACHINES, "policy": "pivot", "cluster": {"devices": 4}},
            0,
            r"cluster\.split\.training = 4: policy 'pivot' puts ranks on nodes 0, 1.*or fewer: 2",
        ),
        (
            {
                "nodes": LOOPBACK,
                "kind": "cuda",
                "cluster": {
                    "kind": "cuda",
                    "devices": 6,
                    "rollout_tp": 2,
                    "reward_tp": 2,
                    "split": {"rollout": 2, "reward": 2, "training": 2},
                },
                "policy": "pivot",
            },
            None,
            "has 3 devices a node, and one replica would be on 2 nodes",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_remedy(
    tmp_path: Path, changed: dict[str, Any], node: int | None, told: str
) -> None:
    nodes = changed.pop("nodes")
    with pytest.raises(ConfigError, match=told):
        machine_of(config_of(tmp_path, nodes, network=REMOTE, **changed), node)


def test_on_one_machine_ranks_may_be_on_all_nodes(tmp_path: Path) -> None:
    config = config_of(tmp_path, LOOPBACK, policy="pivot", cluster={"devices": 4})
    specs = started(config, None)
    assert [option(specs[f"rank-{rank}"], "--node") for rank in range(4)] == ["0", "0", "1", "1"]


def test_the_planner_may_shift_devices_of_several_machines_where_ranks_have_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, MACHINES, policy="pivot", network=REMOTE)
    ranks = [{name for name in started(config, node) if name.startswith("rank")} for node in (0, 1)]
    assert ranks == [set(), {"rank-0", "rank-1"}]


def test_a_later_node_has_the_endpoints_of_the_first(tmp_path: Path) -> None:
    """From the file alone where it says everything, else from the run folder that both share."""
    config = config_of(tmp_path, MACHINES, network=REMOTE)
    first, second = (machine_of(config, node) for node in (0, 1))
    chosen = endpoints_for(config, first, None)
    assert endpoints_for(config, second, None) == chosen
    assert chosen.http_url("gps") == f"http://10.0.0.1:{8600 + SERVICES.index('gps')}"

    shared = config_of(tmp_path, LOOPBACK)
    written = (shared, endpoints_for(shared, machine_of(shared, 0), None))
    assert endpoints_for(shared, machine_of(shared, 1), written) == written[1]


def test_a_later_node_that_cannot_know_says_which_key_would_tell(tmp_path: Path) -> None:
    config = config_of(tmp_path, MACHINES, network={"nats_url": REMOTE["nats_url"]})
    with pytest.raises(ConfigError, match=r"network\.token: is chosen by node 0"):
        endpoints_for(config, machine_of(config, 1), None)
    other = config_of(tmp_path, MACHINES, network={"nats_url": "nats://10.0.0.9:4222"})
    with pytest.raises(ConfigError, match=r"share run\.folder and start node 0 first"):
        endpoints_for(config, machine_of(config, 1), (other, choose_endpoints(other, None)))


def test_several_machines_need_a_broker_that_all_reach(tmp_path: Path) -> None:
    config = config_of(tmp_path, MACHINES)
    with pytest.raises(ConfigError, match=r"network\.nats_url.*only node 0 reaches"):
        endpoints_for(config, machine_of(config, 0), None)


def test_a_node_has_a_supervisor_file_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert [folder.supervisor_file(node).name for node in (0, 1)] == ["supervisor.json", "supervisor-n1.json"]


def test_the_placement_names_the_node_where_there_are_several(tmp_path: Path) -> None:
    several = placement_table(config_of(tmp_path, LOOPBACK))
    assert [column.header for column in several.columns][:2] == ["device", "node"]
    assert list(several.columns[1].cells) == ["0", "0", "1", "1"]
    assert "node" not in [column.header for column in placement_table(config_of(tmp_path, None)).columns]


def test_the_shipped_cluster_starts_on_each_of_its_machines() -> None:
    config = load_config(Path("deploy/config/four_nodes.yaml"))
    machines = [machine_of(config, node) for node in range(4)]
    assert [machine.first_device for machine in machines] == [0, 8, 16, 24]
    for machine in machines:
        endpoints_for(config, machine, None)


def test_run_follows_from_the_first_node_only() -> None:
    with pytest.raises(ConfigError, match=r"up deploy/config/four_nodes\.yaml --node 1"):
        cli.run(Path("deploy/config/four_nodes.yaml"), [], 1)
