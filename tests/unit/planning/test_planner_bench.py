"""The bench of planning decisions stays runnable."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_small_bench_gives_rows_and_a_figure(tmp_path):
    argv = ["--devices", "8", "16", "--repeat", "4", "--json", "--figure", str(tmp_path / "cost.png")]
    done = subprocess.run(
        [sys.executable, "bench/planner.py", *argv], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["devices"] for row in rows] == [8, 16]
    for row in rows:
        assert row["decisions"] == 4
        assert row["choices_that_differ"] == 0
        for who in ("", "reference_"):
            parts = sum(row[f"{who}{phase}_p50_ms"] for phase in ("preprocess", "construct", "simulate"))
            assert parts > 0
    assert (tmp_path / "cost.png").stat().st_size > 10_000
