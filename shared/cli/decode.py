"""Bus traffic for people: `pivotrl tap` and `pivotrl decode`."""

import asyncio
import json
import time
from typing import Any

import nats
from nats.aio.msg import Msg

from shared.contracts import codec
from shared.contracts.subjects import Subjects
from shared.errors import WireError
from shared.runtime.run_folder import Endpoints


def print_decoded(payload: bytes) -> None:
    """One JSON line; a payload that is no MessagePack is shown as text."""
    try:
        print(json.dumps(codec.unpack_untyped(payload), default=str))
    except WireError:
        print(payload.decode(errors="replace"))


async def tap(endpoints: Endpoints, run: str, subject: str, as_json: bool) -> None:
    prefix = Subjects(run).prefix
    client = await nats.connect(endpoints.nats_url, token=endpoints.nats_token or None)

    async def show(msg: Msg) -> None:
        headers: dict[str, Any] = msg.headers or {}
        short = msg.subject.removeprefix(prefix + ".")
        if as_json:
            line = json.dumps({"subject": short, **_values(msg.data)}, default=str)
        else:
            line = f"{time.strftime('%H:%M:%S')} {short:<34} {headers.get(codec.SUMMARY_HEADER, '')}"
        print(line, flush=True)

    await client.subscribe(f"{prefix}.{subject}", cb=show)
    await asyncio.Event().wait()


def _values(payload: bytes) -> dict[str, Any]:
    try:
        values = codec.unpack_untyped(payload)
    except WireError:
        return {"payload": payload.decode(errors="replace")}
    return values if isinstance(values, dict) else {"payload": values}
