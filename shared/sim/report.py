"""Figures of a run: throughput, the fluid bound, and where the device-seconds went.

Throughput counts generated tokens (responses and verdicts) of the samples trained in the measured steps,
warm-up steps excluded. The fluid bound is the device-seconds of that work at the best per-device
throughput, over all devices: every replica at the best batch its KV cache holds, training at its rate,
nothing idle and no shift. No deployment reaches it, because samples under way are limited by the staleness
bound.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from shared.ids import Role
from shared.scheduling.streaming import STREAMING
from shared.sim.cluster import EngineModel, Usage
from shared.sim.run import GENERATING, RunResult
from shared.sim.scenarios import Scenario
from shared.sim.workload import Sample

_STREAMING_NAMES = {streaming: name for name, streaming in STREAMING.items() if streaming}


@dataclass(frozen=True, slots=True)
class FluidBound:
    """Device-seconds of the work at peak, by role, and the step time they allow."""

    rollout_device_s: float
    reward_device_s: float
    training_device_s: float
    step_time_s: float


def fluid_bound(
    scenario: Scenario, engines: Mapping[Role, EngineModel], samples: Sequence[Sample], num_steps: int
) -> FluidBound:
    """Of `samples`, which are `num_steps` steps."""
    rollout, reward = engines[Role.ROLLOUT], engines[Role.REWARD]
    extra = scenario.workload.template_tokens
    of_rollout = of_reward = 0.0
    tokens = 0
    for s in samples:
        of_rollout += _sequence_s(rollout, s.prompt, s.response)
        of_reward += _sequence_s(reward, s.prompt + s.response + extra, s.verdict)
        tokens += s.prompt + s.response
    of_training = scenario.policy.training_s(scenario.device, 1, tokens)
    total = of_rollout + of_reward + of_training
    return FluidBound(
        of_rollout / num_steps,
        of_reward / num_steps,
        of_training / num_steps,
        total / scenario.num_devices / num_steps,
    )


def _sequence_s(engine: EngineModel, prompt: int, generated: int) -> float:
    """Device-seconds of one sequence in the best batch."""
    attention_s = engine.throughput.attention_s_per_token * generated * (prompt + generated / 2)
    decode_s = attention_s + engine.best_overhead_s * generated
    return engine.num_devices * (decode_s + engine.prefill_s_per_token * prompt)


def describe(result: RunResult, split: str = "-") -> dict[str, Any]:
    """One run as plain data: (scenario, mode, split, seed) and its figures, per measured step."""
    first, last = result.start, result.end
    steps = last.num_trained - first.num_trained
    window_s = last.at_s - first.at_s
    step_s = window_s / steps
    tokens = sum(s.response + s.verdict for s in result.trained)
    bound = fluid_bound(result.scenario, result.engines, result.trained, steps)
    spent = device_seconds(result)
    row: dict[str, Any] = {
        "scenario": result.scenario.name,
        "mode": result.mode.name,
        "split": split,
        "seed": result.seed,
        "devices": result.scenario.num_devices,
        "steps": steps,
        "allocation": {
            "rollout": result.shares.rollout or "any",
            "reward": result.shares.reward or "any",
            "training": result.shares.training,
        },
        "throughput_tokens_per_s": round(tokens / window_s, 1),
        "step_time_s": round(step_s, 2),
        "fluid_bound_tokens_per_s": round(tokens / steps / bound.step_time_s, 1),
        "fluid_bound_step_s": round(bound.step_time_s, 2),
        "efficiency": round(bound.step_time_s / step_s, 4),
        "idle_device_s": {role: values["idle"] for role, values in spent.items() if "idle" in values},
        "device_s": spent,
        "shifts_per_step": round((last.num_shifts - first.num_shifts) / steps, 2),
        "aborts_per_step": round(result.num_moves / result.options.num_steps, 1),
        "max_staleness": result.max_staleness,
        "streaming": result.streaming and _STREAMING_NAMES.get(result.streaming, "other"),
    }
    if result.decide_ms:
        ordered = sorted(result.decide_ms)
        row["planner_ms"] = {
            "p50": round(ordered[len(ordered) // 2], 3),
            "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        }
    return row


def device_seconds(result: RunResult) -> dict[str, dict[str, float]]:
    """Device-seconds a step by role and cause. They add up to devices · step time.

    `useful` is decode at the best batch; `underfilled` what smaller batches cost on top.
    """
    first, last = result.start, result.end
    steps = last.num_trained - first.num_trained
    spent: dict[str, dict[str, float]] = {}
    total = result.scenario.num_devices * (last.at_s - first.at_s)
    left = total
    for role in GENERATING:
        used = Usage()
        used.add(last.usage[role])
        used.add(first.usage[role], -1.0)
        width = result.engines[role].num_devices
        causes = {
            "useful": used.decode_s - used.underfilled_s,
            "underfilled": used.underfilled_s,
            "prefill": used.prefill_s,
            "refresh": used.refresh_s,
            "idle": used.idle_s,
        }
        spent[role.value] = {cause: round(width * s / steps, 1) for cause, s in causes.items()}
        left -= width * sum(causes.values())
    devices = result.shares.training
    active_s = last.training_active_s - first.training_active_s
    holds_s = last.training_holds_s - first.training_holds_s
    shifting = min(left - devices * holds_s, last.shifting_device_s - first.shifting_device_s)
    spent["training"] = {
        "useful": round(devices * active_s / steps, 1),
        "idle": round(devices * (holds_s - active_s) / steps, 1),
    }
    spent["none"] = {
        "shifting": round(shifting / steps, 1),
        "free": round((left - devices * holds_s - shifting) / steps, 1),
    }
    return spent


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of rows that differ in nothing else."""
    first = rows[0]
    speeds = [row["throughput_tokens_per_s"] for row in rows]
    return {
        **{key: first[key] for key in ("scenario", "mode", "split", "allocation")},
        "seeds": len(rows),
        "throughput_tokens_per_s": round(fmean(speeds), 1),
        "spread": round(pstdev(speeds), 1),
        "step_time_s": round(fmean(row["step_time_s"] for row in rows), 1),
        "efficiency": round(fmean(row["efficiency"] for row in rows), 4),
        "shifts_per_step": round(fmean(row["shifts_per_step"] for row in rows), 2),
    }


def digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """A fingerprint of results; decision times, which a real clock measures, are left out."""
    plain = [{key: value for key, value in row.items() if key not in ("planner_ms", "cpu_s")} for row in rows]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
