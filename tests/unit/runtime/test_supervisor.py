"""The supervisor over real processes: order, restarts, groups, giving up, and leaving nobody behind."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import DeadlineExceeded
from shared.runtime import supervisor as supervisor_module
from shared.runtime.supervisor import ProcessFailed, ProcessSpec, Supervisor
from tests.support.cluster import until

SLEEPS = "import time; time.sleep(60)"
READY = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open(sys.argv[1], 'w').write('x'); time.sleep(60)"
)
DIES = "import sys; print('out of luck'); sys.exit(3)"


def spec(name: str, code: str, folder: Path, wave: int = 0, **more: object) -> ProcessSpec:
    """A python process, with its ready file as the first argument."""
    ready = folder / f"{name}.ready"
    has_ready = "argv[1]" in code
    argv = (sys.executable, "-S", "-c", code, str(ready))
    return ProcessSpec(name, argv, wave, ready_file=ready if has_ready else None, **more)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


Events = list[tuple[str, str]]


@asynccontextmanager
async def supervised(folder: Path, *specs: ProcessSpec) -> AsyncIterator[tuple[Supervisor, Events]]:
    events: Events = []
    made = Supervisor(specs, folder, lambda event, name, _: events.append((event, name)))
    pids: set[int] = set()
    try:
        yield made, events
    finally:
        pids |= set(made.pids.values())
        started = time.monotonic()
        await made.stop()
        assert time.monotonic() - started < 10
        assert not [pid for pid in pids if is_running(pid)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TERM_GRACE_S", 0.5)


async def test_waves_start_in_order_and_chains_one_by_one(tmp_path: Path) -> None:
    specs = (
        spec("late", READY, tmp_path, wave=2),
        spec("first", READY, tmp_path, wave=0),
        spec("a", READY, tmp_path, wave=1, chain="device 0"),
        spec("b", READY, tmp_path, wave=1, chain="device 0"),
        spec("c", READY, tmp_path, wave=1, chain="device 1"),
    )
    async with supervised(tmp_path, *specs) as (house, events):
        await house.start()
        assert len(house.pids) == 5
        at = {event: i for i, event in enumerate(events)}
        assert at["ready", "first"] < at["starting", "a"]
        assert at["ready", "a"] < at["starting", "b"]
        assert at["starting", "c"] < at["starting", "b"]
        assert max(at["ready", name] for name in "abc") < at["starting", "late"]


async def test_a_killed_process_comes_back(tmp_path: Path) -> None:
    async with supervised(tmp_path, spec("a", READY, tmp_path), spec("b", READY, tmp_path)) as (
        house,
        events,
    ):
        await house.start()
        before = dict(house.pids)
        os.kill(before["a"], signal.SIGKILL)
        await until(lambda: house.pids.get("a", before["a"]) != before["a"], 5)
        assert house.pids["b"] == before["b"]
        assert ("died", "a") in events
        assert house.num_restarts == 1


async def test_a_group_stops_and_comes_back_together(tmp_path: Path) -> None:
    names = ("rank-0", "rank-1", "rank-2")
    specs = [spec(name, READY, tmp_path, group="ranks") for name in names]
    async with supervised(tmp_path, *specs, spec("other", READY, tmp_path)) as (house, _):
        await house.start()
        before = dict(house.pids)
        os.kill(before["rank-1"], signal.SIGKILL)
        os.kill(before["rank-2"], signal.SIGKILL)  # its peers die over it
        await until(lambda: all(house.pids.get(n, before[n]) != before[n] for n in names), 5)
        assert house.pids["other"] == before["other"]
        assert not [name for name in names if is_running(before[name])]
        assert house.num_restarts == 3


async def test_a_member_that_dies_while_its_group_is_starting_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = (
        "import os, sys, time\n"
        "if not os.path.exists(sys.argv[2]): open(sys.argv[2], 'w'); sys.exit(1)\n"
        "time.sleep(60)"
    )
    quick = ProcessSpec(
        "rank-0", (sys.executable, "-S", "-c", once, "x", str(tmp_path / "tried")), 0, group="ranks"
    )
    (tmp_path / "tried").touch()
    async with supervised(tmp_path, quick, spec("rank-1", SLEEPS, tmp_path, group="ranks")) as (house, _):
        await house.start()
        spawn = house._spawn

        async def slow(member: supervisor_module._Member) -> None:
            await spawn(member)
            await asyncio.sleep(0.4)

        monkeypatch.setattr(house, "_spawn", slow)
        (tmp_path / "tried").unlink()
        os.kill(house.pids["rank-1"], signal.SIGKILL)
        await until(lambda: (tmp_path / "tried").exists(), 5)
        await until(lambda: set(house.pids) == {"rank-0", "rank-1"} and house.num_restarts == 4, 8)


async def test_one_that_dies_too_often_ends_the_run_and_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_RESTARTS", 1)
    async with supervised(tmp_path, spec("a", DIES, tmp_path)) as (house, _):
        await house.start()
        error = await asyncio.wait_for(house.failed(), 10)
        assert "a died 2 times" in error.message
        assert "exit code 3" in error.message
        assert str(tmp_path / "a.log") in error.message
        assert "out of luck" in error.message


async def test_one_that_dies_too_often_before_it_is_ready_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_RESTARTS", 0)
    async with supervised(tmp_path, spec("a", f"{DIES}; sys.argv[1]", tmp_path)) as (house, _):
        with pytest.raises(ProcessFailed, match=r"a\.log"):
            await asyncio.wait_for(house.start(), 10)


async def test_one_that_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    late = spec("late", f"{SLEEPS}; argv[1]", tmp_path, ready_deadline_s=0.2)
    async with supervised(tmp_path, late) as (house, _):
        with pytest.raises(DeadlineExceeded, match="late"):
            await house.start()


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with supervised(tmp_path, ProcessSpec("a", ("/no/such/program",), 0)) as (house, _):
        with pytest.raises(ProcessFailed, match="a cannot be started"):
            await house.start()


async def test_stop_ends_those_who_ignore_sigterm_and_their_children(tmp_path: Path) -> None:
    fork = "import os, sys, time; os.fork() or open(sys.argv[1] + '.child', 'w').write(str(os.getpid())); "
    code = fork + STUBBORN
    async with supervised(tmp_path, spec("a", code, tmp_path)) as (house, events):
        await house.start()
        child = tmp_path / "a.ready.child"
        await until(lambda: child.exists() and child.read_text() != "", 5)
        pid = int(child.read_text())
        assert is_running(pid)
        await house.stop()
        await until(lambda: not is_running(pid), 2)
        assert ("stopped", "a") in events


async def test_stop_in_the_middle_of_a_restart_leaves_nobody(tmp_path: Path) -> None:
    for delay_s in (0.0, 0.5, 0.51):
        house = Supervisor([spec("a", READY, tmp_path)], tmp_path)
        await house.start()
        os.kill(house.pids["a"], signal.SIGKILL)
        await asyncio.sleep(delay_s)
        await house.stop()
        await asyncio.sleep(0.05)
        assert house.pids == {}


async def test_the_broker_ends_last(tmp_path: Path) -> None:
    broker = spec("nats", READY, tmp_path, is_broker=True)
    async with supervised(tmp_path, broker, spec("a", READY, tmp_path, wave=1)) as (house, events):
        await house.start()
        await house.stop()
        assert [name for event, name in events if event == "stopped"] == ["a", "nats"]


async def test_nobody_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from shared.runtime.supervisor import ProcessSpec, Supervisor
async def main():
    folder = Path({str(tmp_path)!r})
    ready = folder / "child.ready"
    spec = ProcessSpec("child", (sys.executable, "-S", "-c", {READY!r}, str(ready)), 0, ready_file=ready)
    await Supervisor([spec], folder).start()
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    ready = tmp_path / "child.ready"
    has_pid: Callable[[], bool] = lambda: ready.exists() and ready.read_text() != ""  # noqa: E731
    await until(has_pid, 15)
    pid = int(ready.read_text())
    assert is_running(pid)
    process.kill()
    await process.wait()
    await until(lambda: not is_running(pid), 3)
