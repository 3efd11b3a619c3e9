"""Importing the layout package pulls in no heavy or impure library."""

import subprocess
import sys

FORBIDDEN = ("torch", "nats", "pydantic", "asyncio", "fastapi", "msgpack")
CODE = """
import sys
import shared.layout.refine, shared.layout.replication, shared.layout.spans, shared.layout.transfer_plan
print(",".join(sorted(sys.modules)))
"""


def test_layout_pulls_in_neither_torch_nor_the_bus() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.strip().split(","))
    assert not loaded & set(FORBIDDEN)
