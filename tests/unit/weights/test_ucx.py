"""What UCX said it chose, out of its own log lines."""

import os
from pathlib import Path

import pytest

from shared.errors import TransportError
from shared.weights.ucx import (
    Lane,
    LaneLog,
    WireKind,
    check_lanes,
    interface_of,
    lanes_to_peers,
    set_environment,
)

TCP = """
[1796007428.560432] [vm:4594 :0]  ucp_worker.c:1997 UCX  INFO    run/gps-0/a self cfg#0 rma_am(sysv/memory)
[1796007428.578124] [vm:4594 :0]  ucp_worker.c:1997 UCX  INFO    run/gps-0/a inter-node cfg#1 rma_am(tcp/eth0)  amo_am(tcp/eth0)  am(tcp/eth0)  ka(tcp/eth0)
"""  # noqa: E501
RDMA = (
    "[1.0] [n:1:0] ucp_worker.c:1 UCX  INFO  gps inter-node cfg#2 rma(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) "
    "rma_bw(rc_mlx5/mlx5_0:1) am(rc_mlx5/mlx5_0:1)"
)


def test_lanes_of_parameters_to_other_processes_are_found() -> None:
    assert lanes_to_peers(TCP) == (Lane("tcp", "eth0", "rma_am"),)
    found = lanes_to_peers(RDMA)
    assert {(lane.transport, lane.device) for lane in found} == {
        ("rc_mlx5", "mlx5_0:1"),
        ("rc_mlx5", "mlx5_1:1"),
    }
    assert all(lane.is_rdma for lane in found)
    assert lanes_to_peers("nothing of this") == ()


@pytest.mark.parametrize(
    ("kind", "log", "is_allowed"),
    [
        ("rdma", RDMA, True),
        ("rdma", TCP, False),
        ("tcp", TCP, True),
        ("tcp", RDMA, False),
        ("any", TCP, True),
        ("any", RDMA, True),
        ("rdma", "", True),
    ],
)
def test_silent_fallback_is_an_error_unless_anything_is_allowed(
    kind: WireKind, log: str, is_allowed: bool
) -> None:
    if is_allowed:
        check_lanes(kind, lanes_to_peers(log))
        return
    with pytest.raises(TransportError, match=f"gps.transport is '{kind}', and UCX chose"):
        check_lanes(kind, lanes_to_peers(log))


def test_what_the_environment_says_already_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("UCX_", "NIXL_")):
            monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {"UCX_TLS": "rc"})
        set_environment("tcp", "127.0.0.1", tmp_path / "ucx.log")
        assert os.environ["UCX_TLS"] == "rc"
        assert os.environ["UCX_NET_DEVICES"] == "lo"
        assert os.environ["UCX_TCP_CONN_NB"] == "y"


def test_interface_is_found_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


def test_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ucx.log"
    log = LaneLog(path)
    assert log.lanes() == ()
    path.write_text(TCP[:-60])
    assert log.lanes() == ()
    path.write_text(TCP)
    assert log.lanes() == (Lane("tcp", "eth0", "rma_am"),)
    with path.open("a") as file:
        file.write(RDMA + "\n")
    assert len(log.lanes()) > 2
