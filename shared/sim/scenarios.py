"""The experiments: models, devices, batch, lengths and splits (paper Table 1, Table 4, §8.1).

Lengths are not in the paper beyond the caps of 2K, 15K and 20K tokens. Ours are chosen from public figures
and from what the paper's Figure 10 allows, and are the same for all four groups:

- prompts of competition mathematics have about 100 to 300 tokens: median 150;
- responses of Qwen2.5 policies to such problems start at 600 to 1,000 tokens and grow under DAPO: median
  800, mean 1,180. Figure 10 agrees: training on 8 devices stays under about two minutes there, which is at
  most 1.2M response tokens a step of a 7B policy;
- verdicts come from reasoning models (Qwen3-30B-A3B, GLM-Z1, Qwen3.5), which write about 5K tokens on
  MATH-500 and 12K to 15K on AIME: median 6,000, mean 7,400. Figure 10 agrees that they are most of the
  tokens: three steps take about 1,730 s at 22,800 tokens/s.

A step is 64 prompts of 16 samples for 32 devices and grows with them, so that as many samples are under way
per device in all groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.errors import ConfigError
from shared.sim.models import (
    GLM_Z1_9B,
    H20,
    H200,
    QWEN3_30B_A3B,
    QWEN25_1_5B,
    QWEN25_7B,
    QWEN25_32B,
    QWEN25_72B,
    QWEN35_122B_A10B,
    Device,
    LanguageModel,
)
from shared.sim.workload import Drift, Lengths, Workload


@dataclass(frozen=True, slots=True, order=True)
class Shares:
    """Devices of each role in a fixed deployment."""

    rollout: int
    reward: int
    training: int

    def __str__(self) -> str:
        return f"{self.rollout}/{self.reward}/{self.training}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment; everything that is not the deployment."""

    name: str
    num_devices: int
    device: Device
    policy: LanguageModel
    policy_tp: int
    genrm: LanguageModel
    genrm_tp: int
    workload: Workload
    paper_split: Shares
    """Of the disaggregated deployment, Table 4."""
    paper_shared_training: int
    """Training devices of the rollout–reward colocated deployment, Table 4."""
    pivot_training: int
    """Training devices of PivotRL, Table 4: zero or this many."""
    staleness: int = 2
    training_fixed_s: float = 10.0
    """Of a step, whatever its tokens: assembling, optimizer, collectives."""
    decide_period_s: float = 5.0
    """Between two observations of the planner, which also sees a batch get ready and a shift or step end."""
    abort_s: float = 0.07
    """Until a stopped sequence is confirmed (Table 3)."""
    settle_s: float = 0.6
    """After a shift, before the next observation."""
    growth_margin_tokens: int = 512
    paper_throughput: Mapping[str, float] = field(default_factory=dict)
    """Tokens/s in Figure 9, by mode."""

    def on_devices(self, num_devices: int) -> "Scenario":
        """The same on another number of devices: prompts and shares grow in proportion, in whole replicas."""
        unit = max(self.policy_tp, self.genrm_tp)
        if num_devices < 3 * unit or num_devices % unit:
            raise ConfigError(
                "gpus", num_devices, f"must be a multiple of {unit}, at least {3 * unit}", "Change it"
            )

        def scaled(share: int) -> int:
            return max(unit, round(share * num_devices / self.num_devices / unit) * unit)

        reward, training = scaled(self.paper_split.reward), scaled(self.paper_split.training)
        prompts = max(1, round(self.workload.prompts_per_step * num_devices / self.num_devices))
        return replace(
            self,
            num_devices=num_devices,
            workload=replace(self.workload, prompts_per_step=prompts),
            paper_split=Shares(num_devices - reward - training, reward, training),
            paper_shared_training=scaled(self.paper_shared_training),
            pivot_training=scaled(self.pivot_training),
            paper_throughput={},
        )


DAPO_MATH = Workload(
    prompts_per_step=64,
    samples_per_prompt=16,
    prompt=Lengths(150, 0.5, 2_048),
    response=Lengths(800, 0.9, 15_360),
    verdict=Lengths(6_000, 0.7, 20_480),
)


def _figure9(colocated: float, disaggregated: float, shared: float, pivot: float) -> dict[str, float]:
    return {
        "colocated": colocated,
        "disaggregated": disaggregated,
        "rollout_reward_colocated": shared,
        "pivot": pivot,
    }


GROUP1 = Scenario(
    "group1", 32, H20, QWEN25_1_5B, 1, GLM_Z1_9B, 1, DAPO_MATH, Shares(8, 8, 16), 16, 16,
    paper_throughput=_figure9(27184, 31176, 25405, 50077),
)  # fmt: skip
GROUP2 = Scenario(
    "group2", 32, H20, QWEN25_7B, 1, QWEN3_30B_A3B, 4, DAPO_MATH, Shares(12, 12, 8), 8, 8,
    paper_throughput=_figure9(11545, 11711, 14189, 22822),
)  # fmt: skip
GROUP3 = Scenario(
    "group3", 64, H20, QWEN25_32B, 4, QWEN3_30B_A3B, 4, DAPO_MATH.times(2), Shares(16, 16, 32), 32, 32,
    paper_throughput=_figure9(9998, 13681, 11343, 20503),
)  # fmt: skip
GROUP4 = Scenario(
    "group4", 128, H20, QWEN25_72B, 8, QWEN35_122B_A10B, 8, DAPO_MATH.times(4), Shares(32, 32, 64), 64, 64,
    decide_period_s=10.0,
    paper_throughput=_figure9(6915, 7954, 7530, 12503),
)  # fmt: skip


def _variants() -> list[Scenario]:
    work = DAPO_MATH

    def variant(name: str, workload: Workload) -> Scenario:
        return replace(GROUP2, name=name, workload=workload, paper_throughput={})

    def with_verdict(median: float, sigma: float = 0.7, drift: Drift = Drift()) -> Workload:
        return replace(work, verdict=Lengths(median, sigma, 20_480), verdict_drift=drift)

    def with_response(median: float, sigma: float = 0.9, drift: Drift = Drift()) -> Workload:
        return replace(work, response=Lengths(median, sigma, 15_360), response_drift=drift)

    long_tail = replace(with_response(600, 1.6), verdict=Lengths(3_000, 1.1, 20_480))
    short = replace(variant("short_training", work), policy=QWEN25_1_5B, training_fixed_s=5.0)
    return [
        variant("reward_light", with_verdict(800)),
        variant("reward_heavy", with_verdict(12_000, 0.4)),
        variant("long_tail", long_tail),
        short,
        variant("drift_response", with_response(600, drift=Drift("linear", 4.0))),
        variant("drift_verdict_down", with_verdict(8_000, drift=Drift("linear", 0.25))),
        variant("drift_verdict_up", with_verdict(2_500, drift=Drift("linear", 4.0))),
        variant("drift_jump", with_response(600, drift=Drift("jump", 4.0))),
        replace(variant("group2_h200", work), device=H200),
    ]


SCENARIOS: Mapping[str, Scenario] = {s.name: s for s in (GROUP1, GROUP2, GROUP3, GROUP4, *_variants())}

_NESTED: Mapping[str, type] = {"response": Lengths, "verdict": Lengths, "prompt": Lengths}


def scenario_from(values: Mapping[str, Any]) -> Scenario:
    """A scenario from plain data, as a file has it: `base` names a built-in one, the rest changes it.

        base: group2
        name: short responses
        workload: {response: {median: 800, sigma: 0.9, cap: 15360}}
        paper_split: {rollout: 8, reward: 16, training: 8}

    Raises ConfigError naming the field.
    """
    changes = dict(values)
    base = get_scenario(str(changes.pop("base", "group2")))
    known = set(Scenario.__dataclass_fields__) - {"device", "policy", "genrm", "paper_throughput"}
    for name in changes:
        if name not in known:
            raise ConfigError(
                name, changes[name], "is no setting of a scenario", f"One of {', '.join(sorted(known))}"
            )
    if "workload" in changes:
        work = dict(changes["workload"])
        for name, kind in _NESTED.items():
            if name in work:
                work[name] = kind(**work[name])
        for name in ("response_drift", "verdict_drift"):
            if name in work:
                work[name] = Drift(**work[name])
        changes["workload"] = replace(base.workload, **work)
    if "paper_split" in changes:
        changes["paper_split"] = Shares(**changes["paper_split"])
    return replace(base, **changes)


def get_scenario(name: str) -> Scenario:
    """A built-in scenario; ConfigError for a name that is none."""
    if name not in SCENARIOS:
        raise ConfigError(
            "scenario", name, "is not built in", f"One of {', '.join(SCENARIOS)}, or a YAML file"
        )
    return SCENARIOS[name]
