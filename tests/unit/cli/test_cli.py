"""The command line: what a person types, and what it says when that cannot be."""

import io
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from shared.cli import main as cli
from shared.cli import preflight
from shared.cli.preflight import checks, memory_plan
from shared.contracts import codec
from shared.contracts.planner import DeviceLease
from shared.errors import ConfigError
from shared.ids import sample_id
from shared.runtime.config import RunConfig
from shared.runtime.journal import Journal
from shared.runtime.nodes import Machine
from shared.runtime.run_folder import RunFolder, choose_endpoints

HERE = Machine(nodes=(0,))
DEMO = "deploy/config/demo.yaml"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("audit", "--run", folder)`: exit code, output, error output."""

    def call(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        class Stdin:
            buffer = io.BytesIO(stdin)

        monkeypatch.setattr(sys, "argv", ["pivotrl", *argv])
        monkeypatch.setattr(sys, "stdin", Stdin)
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def make_run(folder: Path, *, port: int = 0) -> RunFolder:
    config = RunConfig.model_validate(
        {
            "models": {"policy": "p", "genrm": "g"},
            "training": {"prompts_per_step": 1},
            "rollout": {"samples_per_prompt": 2},
            "network": {"http_port": port},
        }
    )
    made = RunFolder(folder)
    made.create()
    made.write(config, choose_endpoints(config, None))
    return made


def journal(folder: RunFolder, *, trained: int, issued: int = 4) -> None:
    names = [sample_id(p, k) for p in range(issued // 2) for k in range(2)]
    Journal(folder.journal / "rollout.jsonl").append(*({"event": "issued", "sample": s} for s in names))
    Journal(folder.journal / "trainer.jsonl").append(
        {"event": "resumed", "step": 0},
        *({"event": "trained", "step": 1, "sample": s} for s in names[:trained]),
    )


def test_decode_prints_a_payload_as_json(run: Run) -> None:
    payload = codec.encode(DeviceLease(device=3, owner="rollout-1", epoch=7)).payload
    code, out, _ = run("decode", stdin=payload)
    assert code == 0
    assert json.loads(out) == {"device": 3, "owner": "rollout-1", "epoch": 7}


@pytest.mark.parametrize("payload", [b"plain text", b"\xff\xfe\xfd", b""])
def test_decode_shows_what_is_no_messagepack_as_text(run: Run, payload: bytes) -> None:
    assert run("decode", stdin=payload)[0] == 0


def test_audit_of_a_clean_run(run: Run, tmp_path: Path) -> None:
    journal(make_run(tmp_path / "run"), trained=2)
    code, out, _ = run("audit", "--run", str(tmp_path / "run"))
    told = json.loads(out)
    assert code == 0
    assert told["clean"] is True
    assert (told["issued"], told["trained"], told["in_flight"]) == (4, 2, 2)


def test_audit_of_a_run_that_lost_a_sample_fails_and_names_it(run: Run, tmp_path: Path) -> None:
    journal(make_run(tmp_path / "run"), trained=1)
    code, out, _ = run("audit", "--run", str(tmp_path / "run"))
    assert code == 1
    assert json.loads(out)["lost"] == [sample_id(0, 1)]


def test_plan_shows_placement_and_bytes_and_starts_nothing(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, _ = run("plan", DEMO, "--dry-run", "--set", f"run.folder={folder}")
    assert code == 0
    for text in ("cpu:0", "cpu:1", "rollout-0", "reward-1", "rank-1", "GPS pool", "GiB"):
        assert text in out
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("plan", DEMO, "--set", "trainig.steps=3"), "unknown key. Did you mean 'training'"),
        (("plan", DEMO, "--set", "training.steps=many"), "training.steps = 'many'"),
        (("plan", DEMO, "--set", "training.steps"), "Write KEY=VALUE"),
        (("plan", DEMO, "--set", "policy.x=1"), "policy is no section"),
        (("plan", DEMO, "--set", "training.steps=["), "--set"),
        (("plan", "/no/such.yaml"), "No such file"),
        (("run", "/no/such.yaml"), "No such file"),
        (("doctor", "/no/such.yaml"), "No such file"),
        (("ps", "--run", "/no/run"), "no run is up in /no/run"),
        (("stop", "--run", "/no/run"), "no run is up in /no/run"),
        (("status", "--run", "/no/run"), "no run in /no/run"),
        (("audit", "--run", "/no/run"), "no run in /no/run"),
        (("export", "--run", "/no/run"), "no run in /no/run"),
        (("logs", "nats", "--run", "/no/run"), "no log /no/run/logs/nats.log"),
    ],
)
def test_what_cannot_be_ends_with_2_and_one_clear_message(run: Run, argv: tuple[str, ...], told: str) -> None:
    code, _, err = run(*argv)
    assert code == 2
    assert told in err
    assert "Traceback" not in err


def test_an_unknown_option_ends_with_2(run: Run) -> None:
    assert run("plan", DEMO, "--no-such-option")[0] == 2
    assert run("no-such-command")[0] == 2


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("export",), ("shift", "training")])
def test_with_nothing_up_it_says_which_service_does_not_answer(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    make_run(tmp_path / "run")
    code, _, err = run(*command, "--run", str(tmp_path / "run"))
    assert code == 2
    assert "does not answer at http://127.0.0.1:" in err
    assert "is the run up?" in err


def test_a_stale_or_torn_supervisor_file_is_no_run(run: Run, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for text in ('{"supervisor": 1}', '{"supervisor": 4194303}', '{"superv', ""):
        (folder.path / "supervisor.json").write_text(text)
        code, _, err = run("ps", "--run", str(folder.path))
        assert (code, "no run is up" in err) == (2, True)


def test_logs_are_merged_by_time(run: Run, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name, stamps in (("a", (1, 3)), ("b", (2, 4))):
        lines = [json.dumps({"ts": t, "process": name, "level": "info", "message": f"m{t}"}) for t in stamps]
        (folder.logs / f"{name}.log").write_text("\n".join([*lines, "not json"]) + "\n")
    code, out, _ = run("logs", "--run", str(folder.path))
    assert code == 0
    order = [out.index(f"m{i}") for i in (1, 2, 3, 4)]
    assert order == sorted(order)
    assert run("logs", "--run", str(folder.path), "-n", "1")[1].count("\n") == 1


def test_preflight_names_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "models": {"policy": str(tmp_path / "none"), "genrm": "package:no-such"},
            "cluster": {"devices": 4096},
        }
    )
    found = {c.name: c for c in islice(checks(config, RunFolder(tmp_path), None, HERE), 2)}
    for name, told in (
        ("models.policy", "no such folder"),
        ("models.genrm", "no such packaged model"),
    ):
        error = found[name].error
        assert error is not None, name
        assert told in error.message
        assert error.remedy
    with pytest.raises(ConfigError, match=r"cluster\.devices = 4096: this machine has"):
        preflight._devices(config, HERE)


def test_the_memory_plan_grows_with_devices(tmp_path: Path) -> None:
    def total(devices: int) -> int:
        values = {"models": {"policy": "p", "genrm": "g"}, "cluster": {"devices": devices}}
        plan = memory_plan(RunConfig.model_validate(values), RunFolder(tmp_path), HERE)
        return sum(plan.values())

    assert total(2) < total(4) < total(8)
