"""Tables for people."""

from typing import Any

from rich.table import Table

from shared.ids import Role
from shared.runtime.config import RunConfig
from shared.runtime.nodes import node_addresses, node_of
from shared.runtime.topology import cluster_of


def steps_table(summary: dict[str, Any]) -> Table:
    """One row per step."""
    samples, shifts = summary["samples"], summary["shifts"]
    table = Table(
        "step",
        "reward",
        "verified",
        "GenRM",
        "unscored",
        "rollout tok/s",
        "reward tok/s",
        "stale",
        "shifts",
        "shifting s",
        "step s",
        title=(
            f"{summary['steps']} steps, policy version {summary['policy_version']}, {summary['wall_s']:.0f} s"
        ),
        caption=(
            f"shifts: rollout→reward {shifts['rollout_to_reward']}, "
            f"reward→rollout {shifts['reward_to_rollout']}, →training {shifts['to_training']}, "
            f"training→ {shifts['from_training']}, failed {shifts['failed']}\n"
            f"samples: {samples['issued']} issued = {samples['trained']} trained + "
            f"{samples['unscored']} unscored + {samples['in_flight']} in flight; "
            f"lost {samples['lost']}, duplicated {samples['duplicated']}"
        ),
    )
    for row in summary["rows"]:
        table.add_row(
            str(row["step"]),
            _number(row["reward_mean"]),
            _number(row["verifiable_reward_mean"]),
            _number(row["genrm_reward_mean"]),
            f"{row['num_unscored']}/{row['num_samples']}",
            f"{row['rollout_tokens_per_s']:.0f}",
            f"{row['reward_tokens_per_s']:.0f}",
            str(row["staleness_max"]),
            str(row["shifts"]),
            f"{row['shift_s']:.1f}",
            f"{row['step_s']:.1f}",
        )
    return table


def placement_table(config: RunConfig) -> Table:
    """Which replica and rank each device hosts."""
    cluster = cluster_of(config)
    nodes = len(node_addresses(config))
    columns = ["device", *(["node"] if nodes > 1 else []), "rollout", "reward", "rank"]
    table = Table(*columns, title=f"{config.run.name}: {config.policy}")
    ranks = sorted(cluster.training_devices)
    for device in sorted(cluster.devices):
        names = {
            role: ", ".join(s.id for s in cluster.slots_of(role) if device in s.devices)
            for role in (Role.ROLLOUT, Role.REWARD)
        }
        rank = f"rank-{ranks.index(device)}" if device in ranks else ""
        place = [str(node_of(config, [device]))] if nodes > 1 else []
        table.add_row(
            f"{config.cluster.kind}:{device}", *place, names[Role.ROLLOUT], names[Role.REWARD], rank
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
