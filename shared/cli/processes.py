"""Which processes a run needs on this machine, in which order."""

import os
import sys
from urllib.parse import urlsplit

from shared.bus.embedded_nats import server_binary, write_server_config
from shared.runtime.config import RunConfig
from shared.runtime.run_folder import KERNEL_CACHE, Endpoints, RunFolder
from shared.runtime.supervisor import ProcessSpec
from shared.runtime.topology import cluster_of, rank_devices
from shared.weights.host_copy import copy_environment

ENGINE_START_S = 300.0
RANK_START_S = 900.0
"""The first start compiles DeepSpeed's optimizer, about a minute on two cores, more where they are busy."""


def process_specs(config: RunConfig, folder: RunFolder, endpoints: Endpoints) -> list[ProcessSpec]:
    """nats, then the monitor (it makes the streams) and gps (it seeds the models), then everything else."""
    specs: list[ProcessSpec] = []
    if config.network.nats_url is None:
        address = urlsplit(endpoints.nats_url)
        assert address.hostname is not None
        assert address.port is not None
        conf = write_server_config(
            folder.nats, host=address.hostname, port=address.port, token=endpoints.nats_token
        )
        specs.append(ProcessSpec("nats", (server_binary(), "-c", str(conf)), wave=0, is_broker=True))
    specs.append(_service("monitor", folder, wave=1))
    specs.append(_service("gps", folder, wave=1, deadline_s=300.0))
    specs += [_service(name, folder, wave=2) for name in ("planner", "rollout", "reward", "trainer")]
    return specs + node_specs(config, folder)


def node_specs(config: RunConfig, folder: RunFolder) -> list[ProcessSpec]:
    """What holds devices: the replicas, one per device at a time, and the ranks."""
    specs: list[ProcessSpec] = []
    cores = os.cpu_count() or 1
    for slot in cluster_of(config).slots:
        devices = ",".join(str(d) for d in sorted(slot.devices))
        specs.append(
            ProcessSpec(
                name=slot.id,
                argv=_python("shared.inference", folder, "--replica", slot.id),
                wave=3,
                chain=f"device {min(slot.devices)}",
                env=(*_engine_env(config, devices, min(slot.devices) % cores), ("PIVOTRL_DEVICES", devices)),
                ready_file=folder.processes / f"{slot.id}.json",
                ready_deadline_s=ENGINE_START_S,
            )
        )
    devices_of_ranks = rank_devices(config)
    for rank, device in enumerate(devices_of_ranks):
        name = f"rank-{rank}"
        specs.append(
            ProcessSpec(
                name=name,
                argv=_python("services.trainer.rank", folder, "--rank", str(rank)),
                wave=3,
                group="ranks",
                env=_rank_env(config, device, cores),
                ready_file=folder.processes / f"{name}.json",
                ready_deadline_s=RANK_START_S,
            )
        )
    return specs


def _service(name: str, folder: RunFolder, *, wave: int, deadline_s: float = 120.0) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=_python(f"services.{name}", folder),
        wave=wave,
        env=(("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")),
        ready_file=folder.processes / f"{name}.json",
        ready_deadline_s=deadline_s,
    )


def _python(module: str, folder: RunFolder, *more: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, "--run", str(folder.path), *more)


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


def _rank_env(config: RunConfig, device: int, cores: int) -> tuple[tuple[str, str], ...]:
    common = (
        ("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR", str(KERNEL_CACHE))),
        ("HF_HUB_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        *copy_environment(os.environ),
    )
    if config.cluster.kind == "cuda":
        return (*common, ("CUDA_VISIBLE_DEVICES", str(device)))
    return (*common, ("OMP_NUM_THREADS", "1"), ("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", ""))
