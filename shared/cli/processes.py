"""Which processes a run needs on this machine, in which order."""

import os
import sys
from urllib.parse import urlsplit

from shared.bus.embedded_nats import server_binary, write_server_config
from shared.runtime.config import RunConfig
from shared.runtime.nodes import Machine, node_of
from shared.runtime.run_folder import KERNEL_CACHE, Endpoints, RunFolder, on_node
from shared.runtime.supervisor import ProcessSpec
from shared.runtime.topology import cluster_of, rank_devices
from shared.weights.host_copy import copy_environment

ENGINE_START_S = 300.0
RANK_START_S = 900.0
"""The first start compiles DeepSpeed's optimizer, about a minute on two cores, more where they are busy."""


def process_specs(
    config: RunConfig, folder: RunFolder, endpoints: Endpoints, machine: Machine
) -> list[ProcessSpec]:
    """nats, then the monitor (it makes the streams) and gps (it seeds the models), then everything else; of
    all that what is on `machine`."""
    specs: list[ProcessSpec] = []
    if machine.has_services and config.network.nats_url is None:
        address = urlsplit(endpoints.nats_url)
        assert address.hostname is not None
        assert address.port is not None
        conf = write_server_config(
            folder.nats, host=address.hostname, port=address.port, token=endpoints.nats_token
        )
        specs.append(ProcessSpec("nats", (server_binary(), "-c", str(conf)), wave=0, is_broker=True))
    if machine.has_services:
        specs.append(_service("monitor", folder, wave=1))
    specs += [_service("gps", folder, wave=1, node=node, deadline_s=300.0) for node in machine.nodes]
    if machine.has_services:
        specs += [_service(name, folder, wave=2) for name in ("planner", "rollout", "reward", "trainer")]
    return specs + node_specs(config, folder, machine)


def node_specs(config: RunConfig, folder: RunFolder, machine: Machine) -> list[ProcessSpec]:
    """What holds devices of `machine`: the replicas, one per device at a time, and the ranks. Each is told
    its node."""
    specs: list[ProcessSpec] = []
    cores = os.cpu_count() or 1
    for slot in cluster_of(config).slots:
        node = node_of(config, slot.devices)
        if node not in machine.nodes:
            continue
        local = sorted(machine.local(device) for device in slot.devices)
        specs.append(
            ProcessSpec(
                name=slot.id,
                argv=_python("shared.inference", folder, node, "--replica", slot.id),
                wave=3,
                chain=f"device {min(slot.devices)}",
                env=(
                    *_engine_env(config, ",".join(map(str, local)), local[0] % cores),
                    ("PIVOTRL_DEVICES", ",".join(str(d) for d in sorted(slot.devices))),
                ),
                ready_file=folder.ready_file(slot.id, node),
                ready_deadline_s=ENGINE_START_S,
            )
        )
    for rank, device in enumerate(rank_devices(config)):
        node = node_of(config, [device])
        if node not in machine.nodes:
            continue
        name = f"rank-{rank}"
        specs.append(
            ProcessSpec(
                name=name,
                argv=_python("services.trainer.rank", folder, node, "--rank", str(rank)),
                wave=3,
                group="ranks",
                env=_rank_env(config, machine.local(device)),
                ready_file=folder.ready_file(name, node),
                ready_deadline_s=RANK_START_S,
            )
        )
    return specs


def _service(
    name: str, folder: RunFolder, *, wave: int, node: int = 0, deadline_s: float = 120.0
) -> ProcessSpec:
    return ProcessSpec(
        name=on_node(name, node),
        argv=_python(f"services.{name}", folder, node),
        wave=wave,
        env=(("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")),
        ready_file=folder.ready_file(name, node),
        ready_deadline_s=deadline_s,
    )


def _python(module: str, folder: RunFolder, node: int, *more: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, "--run", str(folder.path), "--node", str(node), *more)


def _engine_env(config: RunConfig, devices: str, core: int) -> tuple[tuple[str, str], ...]:
    common = (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("HF_HUB_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        *copy_environment(os.environ),
    )
    if config.cluster.kind == "cuda":
        return (*common, ("CUDA_VISIBLE_DEVICES", devices))
    return (
        *common,
        ("VLLM_CPU_OMP_THREADS_BIND", str(core)),
        ("OMP_NUM_THREADS", "1"),
        ("CUDA_VISIBLE_DEVICES", ""),
    )


def _rank_env(config: RunConfig, device: int) -> tuple[tuple[str, str], ...]:
    common = (
        ("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR", str(KERNEL_CACHE))),
        ("HF_HUB_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        *copy_environment(os.environ),
    )
    if config.cluster.kind == "cuda":
        return (*common, ("CUDA_VISIBLE_DEVICES", str(device)))
    return (*common, ("OMP_NUM_THREADS", "1"), ("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", ""))
