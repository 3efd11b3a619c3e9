"""Profiles the engine of one role, in a process that has the environment of its replicas.

Standard input: {"config": …, "run": folder, "role": name}. Standard output: a JSON line for each point as it
begins, and the profile at the end. The model's own weights are read: which experts tokens go to depends on
them.
"""

import json
import os
import platform
import re
import sys
import time
from pathlib import Path

from shared.contracts.gps import PoolView
from shared.errors import EngineError, PivotError
from shared.ids import Role
from shared.inference.engines.vllm_engine import VllmEngine
from shared.inference.process import engine_config
from shared.inference.profiler import growth_tokens, measure
from shared.planning.profile import Profile, SweepPoint, profile_of, sweep
from shared.runtime.config import DTYPE, RunConfig
from shared.runtime.models import model_folder
from shared.runtime.profiles import experts_of, model_spec
from shared.runtime.run_folder import RunFolder
from shared.runtime.topology import cluster_of
from shared.weights.host_pool import HostPool
from shared.weights.seed import load_seed, plan_seed

KV_BLOCK_TOKENS = 128
"""The largest block in use (CPU): what a sequence's last one may waste."""


def profile(config: RunConfig, role: Role, folder: RunFolder) -> Profile:
    """Raises what an engine raises, and ConfigError where the model does not fit shared memory."""
    model = model_folder(model_spec(config, role), folder)
    plan = plan_seed(model, DTYPE)
    pool = HostPool(run=f"profile{os.getpid()}", node=0, budget_bytes=plan.nbytes)
    engine = VllmEngine(engine_config(config, cluster_of(config).slots_of(role)[0], model))
    try:
        region = pool.create(role.value, "0", plan.nbytes)
        load_seed(plan, region.memory)
        engine.start()
        engine.wake(PoolView(path=str(region.path), nbytes=plan.nbytes, tensors=plan.tensors), 0)
        pool.close()  # the engine has its copy
        return _measured(engine, model)
    finally:
        pool.close()


def _measured(engine: VllmEngine, model: Path) -> Profile:
    config, capacity = engine.config, engine.load_snapshot().kv_capacity_tokens
    growth = growth_tokens(capacity)
    longest = config.max_model_len - growth
    if longest < 1:
        raise EngineError(f"sequences of at most {config.max_model_len} tokens: over {growth} are needed")
    points = sweep(config.max_num_seqs, longest, capacity, growth + KV_BLOCK_TOKENS)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    measured = measure(
        engine, points, growth=growth, vocab_size=vocab_size, clock=time.perf_counter, on_point=_tell
    )
    num_experts, experts_per_token = experts_of(model)
    return profile_of(
        measured.steps,
        measured.prefill_s_per_token,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        device=_device_name(config.device),
    )


def _device_name(kind: str) -> str:
    if kind == "cpu":
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return named[1] if named else platform.machine()
    import torch

    return str(torch.cuda.get_device_name(0))


def _tell(done: int, total: int, point: SweepPoint) -> None:
    print(json.dumps({"done": done, "total": total, "point": list(point)}), flush=True)


def main() -> None:
    asked = json.load(sys.stdin)
    config = RunConfig.model_validate(asked["config"])
    try:
        found = profile(config, Role(asked["role"]), RunFolder(Path(asked["run"])))
    except PivotError as error:
        print(json.dumps({"error": error.message}), flush=True)
        os._exit(1)
    print(json.dumps({"profile": json.loads(found.to_json())}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine's own teardown takes seconds and leaves nothing behind


if __name__ == "__main__":
    main()
