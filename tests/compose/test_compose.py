"""The compose file on a real engine: a run that trains, a service that dies and comes back, a stop in time.

The engine test builds the image (minutes the first time) and uses ports 8600 to 8605 and 4222 of loopback.
"""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest

from shared.runtime.run_folder import SERVICES

REPOSITORY = Path(__file__).parents[2]
PORTS = {name: 8600 + i for i, name in enumerate(SERVICES)}
BUILD_S, FIRST_STEP_S, RECOVERY_S, FINISH_S = 1800, 900, 300, 600
STOP_GRACE_S = 10
PROJECT = "pivotrl-test"

pytestmark = pytest.mark.compose


def docker(*arguments: str, timeout_s: float = 120) -> str:
    answer = subprocess.run(
        ["docker", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert answer.returncode == 0, f"docker {' '.join(arguments)}: {answer.stderr[-2000:]}"
    return answer.stdout


def compose(*arguments: str, timeout_s: float = 120) -> str:
    return docker("compose", "-p", PROJECT, *arguments, timeout_s=timeout_s)


def has(*arguments: str) -> bool:
    if shutil.which("docker") is None:
        return False
    return (
        subprocess.run(["docker", *arguments], capture_output=True, timeout=30, check=False).returncode == 0
    )


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    if not has("compose", "version"):
        pytest.skip("the docker command with Compose v2 is not installed")
    values: dict[str, Any] = json.loads(compose("config", "--format", "json"))
    return values


def test_every_service_has_a_container_reached_from_loopback_only(described: dict[str, Any]) -> None:
    services = described["services"]
    assert set(services) == {"init", "nats", "node", "follow", *SERVICES}
    published = {
        name: [(p["host_ip"], int(p["published"]), p["target"]) for p in service.get("ports", ())]
        for name, service in services.items()
    }
    for name in SERVICES:
        assert published[name] == [("127.0.0.1", PORTS[name], PORTS[name])]
    assert published["nats"] == [("127.0.0.1", 4222, 4222)]
    assert published["init"] == published["node"] == published["follow"] == []


def test_what_maps_the_pool_shares_memory_that_outlives_each(described: dict[str, Any]) -> None:
    for name in ("gps", "trainer", "node"):
        mounted = {v["target"]: v["source"] for v in described["services"][name]["volumes"]}
        assert mounted["/dev/shm"] == "pool"
    assert described["volumes"]["pool"]["driver_opts"]["type"] == "tmpfs"


def test_all_containers_but_init_restart_and_stop_in_time(described: dict[str, Any]) -> None:
    for name, service in described["services"].items():
        wanted = {"init": "no", "follow": "on-failure:5"}.get(name, "unless-stopped")
        assert service["restart"] == wanted, name
        assert service["stop_grace_period"] == f"{STOP_GRACE_S}s"


@pytest.fixture(scope="module")
def started(described: dict[str, Any]) -> Iterator[None]:
    if not has("info"):
        pytest.skip("no Docker engine answers `docker info`")
    try:
        compose("up", "--build", "-d", timeout_s=BUILD_S)
        yield
    finally:
        compose("down", "-v", timeout_s=120)


@pytest.mark.timeout(BUILD_S + FIRST_STEP_S + RECOVERY_S + FINISH_S + 300)
def test_a_run_in_containers(started: None) -> None:
    first = wait_until(lambda: step() >= 1 and step(), FIRST_STEP_S, "the first step")

    for name, port in PORTS.items():
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200, name
    refused = httpx.post(f"http://127.0.0.1:{PORTS['planner']}/v1/shifts", json={"role": "rollout"})
    assert refused.status_code == 401

    endpoints = json.loads(compose("exec", "-T", "monitor", "cat", "/runs/demo/run.json"))["endpoints"]
    assert "training" in asyncio.run(summary_of("pivotrl.v1.demo.workload.>", endpoints["nats_token"]))

    for name in ("planner", "rollout"):
        kill_inside(name)
        wait_until(lambda name=name: restarts(name) == 1, 60, f"{name} to restart")
    wait_until(lambda: step() > first, RECOVERY_S, "a step after the kills")
    for name, port in PORTS.items():
        wait_until(lambda port=port: answers(port), 60, f"{name} to be ready")
    wait_until(lambda: inspect("follow", "{{.State.Status}}") == "exited", FINISH_S, "the run's end")
    assert inspect("follow", "{{.State.ExitCode}}") == "0", compose("logs", "follow")
    compose("exec", "-T", "monitor", "test", "-s", "/runs/demo/export/model.safetensors")
    report = json.loads(compose("exec", "-T", "monitor", "pivotrl", "audit", "--run", "/runs/demo"))
    assert report["clean"], report

    compose("up", "-d", "--no-deps", "--force-recreate", "gps")
    wait_until(lambda: answers(PORTS["gps"]), 60, "a new gps on the pool that the node holds")

    begin = time.monotonic()
    compose("stop")
    assert time.monotonic() - begin < 3 * STOP_GRACE_S  # they stop one dependency level after another
    killed = [name for name in (*SERVICES, "node", "nats") if inspect(name, "{{.State.ExitCode}}") == "137"]
    assert killed == []


async def summary_of(subject: str, token: str) -> str:
    """The human line of the next message, as the host sees it."""
    client = await nats.connect("nats://127.0.0.1:4222", token=token)
    try:
        subscription = await client.subscribe(subject)
        message = await subscription.next_msg(timeout=10)
        return (message.headers or {})["Pivot-Summary"]
    finally:
        await client.close()


def step() -> int:
    try:
        seen = httpx.get(f"http://127.0.0.1:{PORTS['monitor']}/v1/workload", timeout=5).json()
    except (httpx.HTTPError, ValueError):
        return 0
    return int(seen["workload"]["step"])


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def kill_inside(service: str) -> None:
    """A crash. Not `docker kill`: the engine takes that for a wanted stop and does not restart."""
    subprocess.run(
        ["docker", "compose", "-p", PROJECT, "exec", "-T", service, "bash", "-c", "kill -KILL -1"],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=30,
        check=False,
    )


def inspect(service: str, template: str) -> str:
    container = compose("ps", "-aq", service).strip()
    return docker("inspect", "-f", template, container).strip()


def restarts(service: str) -> int:
    return int(inspect(service, "{{.RestartCount}}"))


def wait_until(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(1)
    pytest.fail(f"no sign of {what} in {deadline_s:.0f} s\n{compose('ps', '-a')}")
