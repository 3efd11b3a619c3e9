"""The deciding packages stay pure."""

import subprocess
import sys

COMPILED = ("compiled", "kernels", "placement")
"""Imported when a replica's load is first made; Numba brings logging and SciPy."""
FORBIDDEN = ("numba", "torch", "asyncio", "nats", "pydantic", "logging", "scipy", "msgpack")


def test_importing_what_decides_pulls_in_nothing_heavy():
    code = (
        "import pkgutil, importlib, sys, shared.planning, shared.scheduling\n"
        "for p in (shared.planning, shared.scheduling):\n"
        "    for m in pkgutil.iter_modules(p.__path__):\n"
        f"        if m.name not in {COMPILED!r}: importlib.import_module(f'{{p.__name__}}.{{m.name}}')\n"
        f"print(*(m for m in {FORBIDDEN!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
