"""A spread run: what `pivotrl init` leaves, and how `pivotrl node` starts and ends."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from shared.cli import node
from shared.errors import ConfigError
from shared.runtime.config import RunConfig
from shared.runtime.run_folder import SERVICES, Endpoints, RunFolder, choose_endpoints, spread_endpoints
from shared.runtime.supervisor import ProcessSpec


def config_of(tmp_path: Path, **network: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "spread", "folder": str(tmp_path / "run")},
            "models": {"policy": "p", "genrm": "g"},
            "network": network,
        }
    )


def test_each_service_listens_everywhere_and_is_reached_by_its_name(tmp_path: Path) -> None:
    endpoints = spread_endpoints(config_of(tmp_path), None, "pivotrl-{service}.lab")
    assert endpoints.host == "0.0.0.0"
    assert endpoints.nats_url == "nats://pivotrl-nats.lab:4222"
    assert endpoints.http_url("gps") == "http://pivotrl-gps.lab:8602"
    assert endpoints.token
    assert endpoints.nats_token


def test_without_names_of_their_own_services_are_reached_where_they_listen(tmp_path: Path) -> None:
    endpoints = choose_endpoints(config_of(tmp_path), None)
    assert {endpoints.http_url(name) for name in SERVICES} == {
        f"http://127.0.0.1:{8600 + i}" for i in range(len(SERVICES))
    }


def test_an_address_without_the_service_or_with_a_free_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="service"):
        spread_endpoints(config_of(tmp_path), None, "one-host")
    with pytest.raises(ConfigError, match="http_port"):
        spread_endpoints(config_of(tmp_path, http_port=0), None, "{service}")


async def test_init_writes_the_run_and_repeated_keeps_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "require", lambda *_: None)
    config = config_of(tmp_path)
    folder = RunFolder(config.run.folder)
    read: list[Endpoints] = []
    for _ in range(2):
        await node.init(config, folder, "{service}", lambda *_: None)
        read.append(folder.read()[1])
    assert read[0] == read[1]
    server = (folder.nats / "nats.conf").read_text()
    assert 'host: "0.0.0.0"' in server
    assert read[0].nats_token in server


async def test_a_node_ends_its_processes_on_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    folder = RunFolder(config.run.folder)
    folder.create()
    folder.write(config, spread_endpoints(config, None, "{service}"))
    up = tmp_path / "up"
    script = f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(60)"
    spec = ProcessSpec("sleeper", (sys.executable, "-c", script), wave=0, ready_file=up)
    monkeypatch.setattr(node, "node_specs", lambda *_: [spec])
    seen: list[str] = []
    serving = asyncio.create_task(node.serve_node(folder, lambda *phase: seen.append(phase[3])))
    while not any("sleeper ready" in text for text in seen):
        assert not serving.done()
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 10)
    assert seen[-1] == "sleeper stopped"
