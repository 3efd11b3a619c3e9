"""What is left of a run on disk: `metrics.jsonl`, TensorBoard scalars, `timeline.png`, `timeline.json`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.monitor.timeline import FREE, SHIFTING, Timeline
from shared.contracts.trainer import StepCompleted

COLOURS = {
    "rollout": "#4477aa",
    "reward": "#ee6677",
    "training": "#228833",
    SHIFTING: "#bbbbbb",
    FREE: "#f2f2f2",
}
"""Told apart by people with any colour vision (Paul Tol's bright set)."""


class MetricsFiles:
    """Appends one JSON line per step, and the same numbers to TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._tensorboard: Any = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows an earlier life of the run wrote, by step."""
        if not self._path.exists():
            return {}
        rows = [json.loads(line) for line in self._path.read_text().splitlines() if line.strip()]
        return {row["step"]: row for row in rows}

    def write(self, step: StepCompleted, extra: dict[str, float]) -> None:
        row = {**step.model_dump(mode="json"), **extra}
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if self._tensorboard is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._tensorboard.add_scalar(name, value, step.step)
            self._tensorboard.flush()

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def write_timeline(timeline: Timeline, folder: Path, now_s: float, title: str) -> None:
    """The picture and its numbers. Seconds count from the first event."""
    spans = timeline.closed(now_s)
    values = {
        "spans": [asdict(span) for span in spans],
        "throughput": timeline.throughput,
        "device_seconds": timeline.device_seconds(now_s),
        "shifts": [event.model_dump(mode="json") for event in timeline.shifts],
    }
    (folder / "timeline.json").write_text(json.dumps(values))
    if spans:
        _draw(timeline, folder / "timeline.png", now_s, title)


def _draw(timeline: Timeline, path: Path, now_s: float, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    spans = timeline.closed(now_s)
    zero_s = min(span.start_s for span in spans)
    devices = sorted({span.device for span in spans})
    figure, (top, bottom) = pyplot.subplots(
        2,
        1,
        sharex=True,
        figsize=(11, 3.2 + 0.35 * len(devices)),
        height_ratios=[max(1, 0.35 * len(devices)), 2],
    )
    for span in spans:
        width = (span.end_s or now_s) - span.start_s
        top.barh(
            span.device,
            width,
            left=span.start_s - zero_s,
            color=COLOURS.get(span.owner, "#999999"),
            height=0.8,
        )
    top.set_yticks(devices, [f"device {d}" for d in devices])
    top.invert_yaxis()
    top.set_title(title)
    for event in timeline.shifts:
        if not event.shift_id.startswith("start-"):
            colour = "#cc3311" if event.phase == "failed" else "#333333"
            bottom.axvline(event.now_s - zero_s, color=colour, linewidth=0.7, linestyle=":")
    rows = [row for row in timeline.throughput if row[0] >= zero_s]
    times = [row[0] - zero_s for row in rows]
    for column, role in ((1, "rollout"), (2, "reward")):
        bottom.plot(
            times,
            [row[column] for row in rows],
            color=COLOURS[role],
            label=role,
            linewidth=1.3,
        )
    bottom.set_xlabel("seconds (dotted: a shift was completed)")
    bottom.set_ylabel("tokens/s")
    bottom.set_ylim(bottom=0)
    owners = ["rollout", "reward", "training", SHIFTING, FREE]
    figure.legend(
        handles=[Patch(color=COLOURS[o], label=o) for o in owners], ncols=5, loc="lower center", frameon=False
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
