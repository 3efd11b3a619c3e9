"""`pivotrl sim` on a small scenario from a file."""

import json

from typer.testing import CliRunner

from shared.cli.main import app
from shared.cli.sim import load_scenario
from shared.sim.modes import MODES
from shared.sim.run import Options
from shared.sim.search import best_split, feasible_splits, streaming_choices

SMALL = "bench/scenarios/small.yaml"


def run(*args):
    result = CliRunner().invoke(app, ["sim", "--scenario", SMALL, "--steps", "4", "--warmup", "1", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_rows_carry_what_a_comparison_needs(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["--mode", "pivot", "--mode", "disaggregated", "--seeds", "2", "--out", str(out), "--json"]
    rows = [json.loads(line) for line in run(*options).splitlines()]
    assert [(r["mode"], r["split"], r["seed"]) for r in rows] == [
        ("pivot", "paper", 0),
        ("pivot", "paper", 1),
        ("disaggregated", "paper", 0),
        ("disaggregated", "paper", 1),
        ("disaggregated", "best", 0),
        ("disaggregated", "best", 1),
    ]
    for row in rows:
        assert row["throughput_tokens_per_s"] > 0
        assert set(row["idle_device_s"]) == {"rollout", "reward", "training"}
    assert rows[0]["planner_ms"]["p50"] <= rows[0]["planner_ms"]["p99"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows


def test_the_table_names_every_mode():
    shown = run("--mode", "all", "--seeds", "1", "--no-best")
    assert all(name in shown for name in MODES)
    assert "digest" in shown


def test_unknown_names_are_refused():
    result = CliRunner().invoke(app, ["sim", "--scenario", "nowhere"])
    assert result.exit_code != 0
    assert "nowhere" in str(result.exception)


def test_the_search_by_bound_finds_the_split_that_trying_all_finds():
    scenario = load_scenario(SMALL)
    options = Options(num_steps=4, warmup_steps=1)
    found = best_split(scenario, "disaggregated", 0, options, num_full=50)
    everything = best_split(scenario, "disaggregated", 0, options, num_full=50, prune=False)
    assert len(everything.tried) == len(list(feasible_splits(scenario, MODES["disaggregated"])))
    assert found.best == everything.best
    assert len(found.tried) <= len(everything.tried)


def test_the_search_takes_the_better_way_to_stream():
    scenario = load_scenario(SMALL)
    options = Options(num_steps=4, warmup_steps=1)
    found = best_split(scenario, "pivot_best", 0, options, streams=True, num_full=50)
    num_splits = len(list(feasible_splits(scenario, MODES["pivot_best"])))
    assert found.num_feasible == 3 * num_splits
    assert {choice.streaming for choice, _ in found.tried} == {"eager", "bursts", "late"}
    everything = best_split(scenario, "pivot_best", 0, options, streams=True, num_full=50, prune=False)
    assert found.best == everything.best
    speeds = dict(everything.tried)
    assert speeds[found.best] == max(speeds.values())
    by_shares = {choice.shares: set[float]() for choice in speeds}
    for choice, speed in speeds.items():
        by_shares[choice.shares].add(speed)
    assert any(len(ways) > 1 for ways in by_shares.values()), "the way to stream makes a difference"
    whole = best_split(scenario, "pivot_best", 0, options, num_full=50)
    assert {choice.streaming for choice, _ in whole.tried} == {"off"}


def test_modes_stream_in_the_way_that_suits_them():
    ways = {name: streaming_choices(mode) for name, mode in MODES.items()}
    assert ways["disaggregated"] == ways["rollout_reward_colocated"] == ("eager",)
    assert ways["pivot"] == ways["pivot_best"] == ("late", "bursts", "eager")
    assert ways["colocated"] == ("off",)


def test_rows_tell_how_a_run_streamed():
    modes = ["--mode", "disaggregated", "--mode", "pivot", "--mode", "colocated"]
    shown = run(*modes, "--seeds", "1", "--no-best", "--streaming", "--json")
    rows = [json.loads(line) for line in shown.splitlines()]
    assert [row["streaming"] for row in rows] == ["eager", "late", None]
    assert "paper late" in run("--mode", "pivot", "--seeds", "1", "--no-best", "--streaming")
