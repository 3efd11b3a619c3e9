"""How long one planning decision takes: `python bench/planner.py [--json] [--devices 16 32 …] [--repeat 20]`.

Per cluster size: reading the workload into replayable loads and building shift pairs (pre-processing), the
dynamic program (construction), replaying every candidate (simulation), and the whole `Planner.step`, which
replays those that may be the best. Rollout replicas take one device, reward replicas four; a
third of the devices serve reward; loads have a long tail.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.ids import DeviceId, Role, replica_id
from shared.planning.candidates import candidates
from shared.planning.cluster import Allocation, ClusterSpec, ReplicaSlot
from shared.planning.config import PlannerConfig, RolePlanning
from shared.planning.evaluate import RoleReplay
from shared.planning.pairs import ShiftPair, shift_pairs
from shared.planning.plan import WorkloadObserved
from shared.planning.planner import Planner
from shared.planning.workload import TrainingState, WorkloadState
from shared.scheduling.sequence import ReplicaLoad, RoleLoad
from shared.scheduling.throughput import H20_7B_TP1, H200_30B_A3B_TP1

KV_TOKENS = {Role.ROLLOUT: 400_000, Role.REWARD: 1_600_000}
MODELS = {Role.ROLLOUT: H20_7B_TP1, Role.REWARD: H200_30B_A3B_TP1}
REWARD_TP = 4
PHASES = ("preprocess", "construct", "simulate", "step")
T = TypeVar("T")


def random_state(num_devices: int, rng: random.Random) -> tuple[ClusterSpec, Allocation, WorkloadState]:
    """A cluster mid-run: some replicas of each role busy, some idle, reward usually the more pressed."""
    devices = [DeviceId(i) for i in range(num_devices)]
    rollout = [
        ReplicaSlot(replica_id(Role.ROLLOUT, i), Role.ROLLOUT, frozenset([d])) for i, d in enumerate(devices)
    ]
    reward = [
        ReplicaSlot(
            replica_id(Role.REWARD, i), Role.REWARD, frozenset(devices[i * REWARD_TP : (i + 1) * REWARD_TP])
        )
        for i in range(num_devices // REWARD_TP)
    ]
    cluster = ClusterSpec(frozenset(devices), (*rollout, *reward), frozenset(devices[: num_devices // 2]))
    num_reward = max(1, num_devices // (3 * REWARD_TP))
    active_reward, first_rollout = reward[:num_reward], num_reward * REWARD_TP
    active = [slot.id for slot in (*active_reward, *rollout[first_rollout:])]

    def loaded(slot: ReplicaSlot, mean: int) -> ReplicaLoad:
        n = max(1, int(rng.gauss(mean, mean / 4)))
        lengths = tuple(sorted(min(16_000, int(rng.lognormvariate(7.2, 0.8))) for _ in range(n)))
        return ReplicaLoad(slot.id, n, sum(lengths), KV_TOKENS[slot.role], lengths)

    roles = {
        Role.ROLLOUT: RoleLoad(tuple(loaded(slot, 24) for slot in rollout[first_rollout:])),
        Role.REWARD: RoleLoad(
            tuple(loaded(slot, 90) for slot in active_reward),
            tuple(int(rng.lognormvariate(7.5, 0.5)) for _ in range(rng.randrange(num_devices))),
        ),
    }
    state = WorkloadState(roles[Role.ROLLOUT], roles[Role.REWARD], TrainingState())
    return cluster, Allocation(frozenset(active)), state


def timed(work: Callable[[], T], into: list[float]) -> T:
    start = time.perf_counter()
    result = work()
    into.append((time.perf_counter() - start) * 1e3)
    return result


Situation = tuple[ClusterSpec, Allocation, WorkloadState]
CONFIG = PlannerConfig(
    rollout=RolePlanning(MODELS[Role.ROLLOUT], KV_TOKENS[Role.ROLLOUT]),
    reward=RolePlanning(MODELS[Role.REWARD], KV_TOKENS[Role.REWARD]),
)


def replay(situation: Situation, role: Role) -> RoleReplay:
    cluster, allocation, state = situation
    idle = [slot.id for slot in cluster.slots_of(role) if slot.id not in allocation.active]
    return RoleReplay(
        state.of(role),
        allocation.active_of(role, cluster),
        idle,
        model=MODELS[role],
        migrate=True,
        kv_capacity_tokens=KV_TOKENS[role],
        growth_tokens=512,
    )


def preprocess(situation: Situation) -> tuple[RoleReplay, RoleReplay, list[ShiftPair]]:
    cluster, allocation, _ = situation
    rollout, reward = replay(situation, Role.ROLLOUT), replay(situation, Role.REWARD)
    pairs = shift_pairs(
        cluster, allocation, Role.REWARD, lambda r: 5.0 * rollout.tokens_per_s_of(r), training_active=False
    )
    return rollout, reward, pairs


def measure_once(situation: Situation, times: dict[str, list[float]]) -> tuple[int, int]:
    """Add one time to each phase; returns the numbers of sequences and candidates."""
    rollout, reward, pairs = timed(lambda: preprocess(situation), times["preprocess"])
    found = timed(lambda: candidates(pairs, sum(len(p.up_replicas) for p in pairs)), times["construct"])

    def simulate() -> list[tuple[float, float]]:
        return [
            (reward.after_shift_up(c.up_replicas), rollout.after_shift_down(c.down_replicas)) for c in found
        ]

    timed(simulate, times["simulate"])
    cluster, allocation, state = situation
    planner = Planner(CONFIG, cluster, allocation)
    timed(lambda: planner.step(WorkloadObserved(state), 0.0), times["step"])
    return rollout.num_sequences + reward.num_sequences, len(found)


def measure(num_devices: int, repeat: int, seed: int) -> dict[str, Any]:
    """Milliseconds of each phase over `repeat` random states."""
    rng = random.Random(seed)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    sizes = [measure_once(random_state(num_devices, rng), times) for _ in range(repeat)]
    row: dict[str, Any] = {
        "devices": num_devices,
        "sequences": round(statistics.mean(n for n, _ in sizes)),
        "candidates": round(statistics.mean(k for _, k in sizes)),
    }
    for phase, values in times.items():
        ordered = sorted(values)
        row[f"{phase}_p50_ms"] = round(statistics.median(ordered), 3)
        row[f"{phase}_p99_ms"] = round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 32, 64, 128, 1024, 4096])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    columns = ["devices", "sequences", "candidates", *(f"{p}_{q}_ms" for p in PHASES for q in ("p50", "p99"))]
    if not options.json:
        print("  ".join(columns))
    for num_devices in options.devices:
        row = measure(num_devices, options.repeat if num_devices <= 128 else 1, options.seed)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print("  ".join(f"{row[c]:>{len(c)}}" for c in columns), flush=True)


if __name__ == "__main__":
    main()
