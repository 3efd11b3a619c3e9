"""Progress with phase and ETA: a bar on a terminal, lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

TITLES = {name: name for name in ("models", "profile", "start", "export", "stop")} | {"train": "steps"}


class Progress:
    """Called with (phase, done, total, text)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last = ("", -1, "")
        self._train_started: tuple[float, int] | None = None
        if console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description:<8}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, phase: str, done: int, total: int, text: str) -> None:
        if phase == "event":
            self._console.print(f"! {text}", highlight=False)
            return
        if phase == "train":
            text = f"{self._eta(done, total)}{text}"
        if self._bar:
            if phase not in self._tasks:
                self._tasks[phase] = self._bar.add_task(TITLES[phase], total=total, text="")
            self._bar.update(self._tasks[phase], completed=done, total=total, text=text[:90])
        elif (phase, done, text if phase != "train" else "") != self._last:
            self._last = (phase, done, text if phase != "train" else "")
            self._console.print(f"[{TITLES[phase]} {done}/{total}] {text}", highlight=False, markup=False)

    def _eta(self, done: int, total: int) -> str:
        """From the mean time of the steps seen so far."""
        now = time.monotonic()
        if self._train_started is None:
            self._train_started = (now, done)
        started, first = self._train_started
        if done <= first:
            return ""
        left = (now - started) / (done - first) * (total - done)
        return f"ETA {int(left // 60)}:{int(left % 60):02d}  "
