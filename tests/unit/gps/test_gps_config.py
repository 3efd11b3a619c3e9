"""The gps section: what it refuses, and where node 0 is reached."""

from pathlib import Path

import pytest

from services.gps.cluster_app import address_of
from shared.errors import ConfigError
from shared.runtime.config import load_config
from shared.runtime.run_folder import choose_endpoints, spread_endpoints

MODELS = "models:\n  policy: a\n  genrm: b\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MODELS + text)
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gps:\n  nodes: [10.0.0.1, 10.0.0.1]\n", "gps.nodes names an address twice: 10.0.0.1"),
        ("gps:\n  heartbeat_s: 2\n  dead_after_s: 3\n", "gps.dead_after_s = 3 is less than two of"),
        ("gps:\n  transport: udp\n", "'rdma', 'tcp' or 'any'"),
        ("gps:\n  nodes: []\n", "at least 1 item"),
        ("gps:\n  node_bytes: 0\n", "greater than 0"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+") as caught:
        load_config(write(tmp_path, text))
    assert told in caught.value.message


def test_node_zero_is_reached_where_it_listens(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "gps:\n  nodes: [10.0.0.1, 10.0.0.2]\n"))
    assert choose_endpoints(config, None).http_url("gps") == "http://10.0.0.1:8602"
    assert spread_endpoints(config, None, "{service}.local").http_url("gps") == "http://10.0.0.1:8602"
    assert config.gps is not None
    assert address_of(config.gps, 1) == "10.0.0.2"
    with pytest.raises(ConfigError, match="has no address for node 2"):
        address_of(config.gps, 2)


def test_one_node_is_the_default_and_stays_where_the_services_are(tmp_path: Path) -> None:
    for text in ("", "gps:\n  heartbeat_s: 2\n"):
        config = load_config(write(tmp_path, text))
        assert choose_endpoints(config, None).http_url("gps") == "http://127.0.0.1:8602"
