"""Where measurements go: checks, findings, and speeds beside that of a plain copy."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gps_bench.timing import Times, interleaved

MOST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Device:
    """Where parameters live; on a CPU all is the same, but for the pinning."""

    name: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "cuda"

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.name)

    def finish(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


@dataclass
class Report:
    checks: dict[str, bool] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def row(self, times: Times, nbytes: int, limit: str, name: str, **labels: Any) -> None:
        """How fast `name` was, beside the plain copy `limit` of as many bytes."""
        self.rows.append(
            labels
            | {
                "gb": round(nbytes / 1e9, 3),
                "gb_per_s": times.gb_per_s(nbytes, name),
                "limit_gb_per_s": times.gb_per_s(nbytes, limit),
                "ratio": times.ratio(limit, name),
                "rounds": len(times.rounds[name]),
            }
        )
        print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """An error in it fails its check, and the next section runs."""
        begin = time.perf_counter()
        try:
            yield
            self.checks.setdefault(f"{name}: ran to its end", True)
        except Exception as error:
            traceback.print_exc()
            self.checks[f"{name}: ran to its end"] = False
            self.findings.append(f"{name}: {type(error).__name__}: {error}")
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def timed(work: Mapping[str, Callable[[], object]], budget_s: float) -> Times:
    """`work` in rounds, as many as fit the budget; a first round counts only where there is time for no
    more."""
    first: dict[str, list[float]] = {}
    for name, do in work.items():
        begin = time.perf_counter()
        do()
        first[name] = [time.perf_counter() - begin]
    once_s = sum(seconds for (seconds,) in first.values())
    rounds = min(MOST_ROUNDS, int(budget_s / once_s) - 2)
    return interleaved(work, rounds) if rounds > 0 else Times(first)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in every byte."""
    return left.shape == right.shape and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
