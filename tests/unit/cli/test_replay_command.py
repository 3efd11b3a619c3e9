"""`pivotrl replay` on records of a real run: the demo's configuration with three steps, on two CPU slots."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from shared.cli import main as cli
from shared.cli.replay import changed
from shared.errors import ConfigError
from shared.planning.config import PlannerConfig

RECORDED = Path(__file__).parents[2] / "support" / "data" / "decisions-demo.jsonl"


@pytest.fixture
def recorded(tmp_path):
    (tmp_path / "journal").mkdir()
    shutil.copy(RECORDED, tmp_path / "journal" / "decisions.jsonl")
    return tmp_path


@pytest.fixture
def pivotrl(monkeypatch, capsys):
    """`pivotrl("replay", folder)`: exit code, output, error output."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["pivotrl", *map(str, argv)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, " ".join(err.split())

    return call


def test_the_recorded_settings_decide_as_recorded(pivotrl, recorded):
    code, out, _ = pivotrl("replay", recorded, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["differences"] == []
    summary = found["summary"]
    assert summary["decisions"] == summary["reproduced"] == 120
    assert summary["shifts_recorded"] == summary["shifts_changed"] == 5
    assert len(found["shifts"]) == summary["shifts_predicted"] == 3
    assert found["shifts"][0]["predicted"] > found["shifts"][0]["before"]
    assert found["shifts"][0]["error"] == pytest.approx(
        found["shifts"][0]["predicted"] / found["shifts"][0]["actual"] - 1
    )
    assert summary["rollout_model_error_median"] > 0


def test_other_settings_decide_otherwise(pivotrl, recorded):
    code, out, _ = pivotrl("replay", recorded, "--json", "--set", "policy=disaggregated")
    found = json.loads(out)
    assert code == 0
    assert found["summary"]["shifts_changed"] == 0
    assert len(found["differences"]) == found["summary"]["differ"] == 5
    first = found["differences"][0]
    assert first["recorded"]["up_replicas"]
    assert first["changed"] == {
        "reason": "devices are fixed",
        "up_role": None,
        "up_replicas": [],
        "down_replicas": [],
        "chosen": None,
    }


def test_people_get_tables(pivotrl, recorded):
    code, out, _ = pivotrl("replay", recorded, "--set", "planner.min_rollout=1", "--set", "planner.H=30")
    assert code == 0
    assert "decisions that differ" in out
    assert "tokens/s of the shifts made" in out
    assert "differ" in out


def test_settings_are_named_as_in_a_run_or_as_the_planners():
    config = changed(
        PlannerConfig(),
        ["planner.H=30", "planner.min_reward=2", "planner.rollout.max_replicas=8", "planner.exact=true"],
    )
    assert config.window_s == 30.0
    assert config.reward.min_replicas == 2
    assert config.rollout.max_replicas == 8
    assert config.exact


@pytest.mark.parametrize(
    ("override", "names", "remedy"),
    [
        ("planner.HH=3", "--set planner.HH", "planner.(H,"),
        ("window_s=3", "--set window_s", "planner.(H,"),
        ("planner.rollout.nothing=3", "--set planner.rollout.nothing", "Settings:"),
        ("planner.window_s.x=3", "--set planner.window_s.x", "Settings:"),
        ("planner.H", "--set", "Write planner.NAME=VALUE"),
        ("planner.H=soon", "--set planner.H", "value of its type"),
        ("planner.exact=3", "--set planner.exact", "value of its type"),
        ("planner.H=-1", "window_s", "60 is the paper's choice"),
        ("planner.rollout=3", "--set planner.rollout", "Add one of"),
        ("policy=guess", "--set policy", "disaggregated"),
        ("planner.H=[", "--set planner.H", "Quote it"),
    ],
)
def test_a_setting_that_cannot_be_is_told(pivotrl, recorded, override, names, remedy):
    with pytest.raises(ConfigError) as raised:
        changed(PlannerConfig(), [override])
    assert raised.value.field == names
    code, out, err = pivotrl("replay", recorded, "--set", override)
    assert (code, out) == (2, "")
    assert err.startswith(f"config: {names}")
    assert remedy in err


def test_what_is_not_there_is_told(pivotrl, recorded, tmp_path):
    code, _, err = pivotrl("replay", tmp_path / "nothing")
    assert code == 2
    assert err.startswith("not_found: run: there is no folder")
    assert "Give the folder of a run" in err
    journal = recorded / "journal" / "decisions.jsonl"
    journal.write_text("")
    code, _, err = pivotrl("replay", recorded)
    assert code == 2
    assert err.startswith("not_found: decisions:")
    assert "until its planner has decided" in err
    journal.write_text(
        '{"now_s": 1.0, "event": "WorkloadObserved", "values": {"state": {}}, "effects": []}\n'
    )
    code, _, err = pivotrl("replay", recorded)
    assert code == 2
    assert "format 1, but format 2 can be replayed" in err
    assert "Record the run again" in err
