"""Fitting the throughput model, offline from a profile and online from live steps.

Offline: robust least squares on relative errors, then a second fit without the outliers. The sweep must cross
n = B/C, because below it B and D only appear as their sum.
Online: devices drift (clocks, other tenants), so a slowly moving factor corrects the profiled latency as a
whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest
from shared.scheduling.throughput import ThroughputModel, touched_experts

__all__ = ["Fit", "OnlineCalibration", "StepTime", "ThroughputModel", "fit", "relative_errors"]

_OUTLIER_MADS = 4.5
_FLOOR_S = 1e-9
"""Keeps a fit where every constant came out 0 a valid model."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measured decode step: `n` sequences, `tok` resident tokens, seconds."""

    n: int
    tok: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and its relative errors over all points it was given, outliers included."""

    model: ThroughputModel
    median_rel_error: float
    worst_rel_error: float


def fit(points: Sequence[StepTime], *, num_experts: int = 0, experts_per_token: int = 0) -> Fit:
    """The model closest to `points`; the expert term is fitted when the expert counts are given.

    Raises InvalidRequest with fewer points than constants, or a step that took no time.
    """
    num_constants = 5 if num_experts else 4
    if len(points) < num_constants:
        raise InvalidRequest("points", f"{len(points)} given, at least {num_constants} needed")
    if any(p.latency_s <= 0 or p.n < 1 for p in points):
        raise InvalidRequest("points", "every step needs n >= 1 and latency_s > 0")
    n = np.array([p.n for p in points], dtype=np.float64)
    tok = np.array([p.tok for p in points], dtype=np.float64)
    seconds = np.array([p.latency_s for p in points], dtype=np.float64)
    touched = np.array(
        [touched_experts(p.n, num_experts, experts_per_token) if num_experts else 0.0 for p in points]
    )

    constants = _least_squares(n, tok, touched, seconds, num_constants)
    residuals = _relative_errors(constants, n, tok, touched, seconds)
    spread = float(np.median(np.abs(residuals - np.median(residuals))))
    kept = np.abs(residuals - np.median(residuals)) <= _OUTLIER_MADS * 1.4826 * spread + 1e-12
    if num_constants <= int(kept.sum()) < len(points):
        constants = _least_squares(n[kept], tok[kept], touched[kept], seconds[kept], num_constants)
    a, b, c, d, *experts = (float(x) for x in constants)
    model = ThroughputModel(a, b, c, d + _FLOOR_S)
    if experts:
        model = replace(
            model, experts_s=experts[0], num_experts=num_experts, experts_per_token=experts_per_token
        )
    median, worst = relative_errors(model, points)
    return Fit(model, median, worst)


def relative_errors(model: ThroughputModel, points: Sequence[StepTime]) -> tuple[float, float]:
    """Median and worst |predicted − measured| / measured: the figures to report on held-out runs."""
    errors = [abs(model.latency_s(p.n, p.tok) / p.latency_s - 1.0) for p in points]
    return float(np.median(errors)), max(errors)


def _relative_errors(constants: Vector, n: Vector, tok: Vector, touched: Vector, seconds: Vector) -> Vector:
    a, b, c, d = constants[:4]
    predicted = a * tok + np.maximum(b, c * n) + d
    if len(constants) == 5:
        predicted = predicted + constants[4] * touched
    errors: Vector = predicted / seconds - 1.0
    return errors


def _least_squares(n: Vector, tok: Vector, touched: Vector, seconds: Vector, num_constants: int) -> Vector:
    from scipy.optimize import least_squares

    shortest, longest = float(seconds.min()), float(seconds.max())
    scale = np.array([longest / tok.max(), shortest, longest / n.max(), shortest, longest])[:num_constants]
    best = None
    # The kink at n = B/C makes local minima: start from a floor that is low, even with D, and high.
    for floor in (0.05, 0.5, 0.9):
        start = np.array([0.3, floor, 0.5, 1.0 - floor, 0.5])[:num_constants]
        result = least_squares(
            lambda x: _relative_errors(x * scale, n, tok, touched, seconds),
            start,
            bounds=(0.0, np.inf),
            loss="soft_l1",
            f_scale=0.02,
        )
        if best is None or result.cost < best.cost:
            best = result
    assert best is not None
    return np.asarray(best.x * scale, dtype=np.float64)


class OnlineCalibration:
    """Keeps a profiled model honest against live step times.

    Each observed step moves a factor on the whole latency by `weight` of its miss; `error` is the moving
    mean of the relative error *before* the correction of that step.
    """

    def __init__(self, model: ThroughputModel, weight: float = 0.05) -> None:
        self._profiled = model
        self._weight = weight
        self._factor = 1.0
        self._error = 0.0

    def observe(self, step: StepTime) -> None:
        """Take in one live step."""
        ratio = step.latency_s / self._profiled.latency_s(step.n, step.tok)
        miss = abs(self._factor / ratio - 1.0)
        self._error += self._weight * (miss - self._error)
        self._factor += self._weight * (ratio - self._factor)

    @property
    def model(self) -> ThroughputModel:
        """The profiled model with every constant scaled by the present factor."""
        base, factor = self._profiled, self._factor
        return replace(
            base,
            attention_s_per_token=base.attention_s_per_token * factor,
            weights_s=base.weights_s * factor,
            compute_s_per_sequence=base.compute_s_per_sequence * factor,
            fixed_s=base.fixed_s * factor,
            experts_s=base.experts_s * factor,
        )

    def gauges(self) -> dict[str, float]:
        """`latency_factor` (1 = as profiled) and `model_rel_error`."""
        return {"latency_factor": self._factor, "model_rel_error": self._error}
