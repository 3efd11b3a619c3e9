"""The simulator is pure."""

import subprocess
import sys

FORBIDDEN = ("torch", "asyncio", "nats", "pydantic", "logging", "yaml", "matplotlib", "msgpack")


def test_importing_the_simulator_pulls_in_nothing_heavy():
    code = (
        "import pkgutil, importlib, sys, shared.sim as p\n"
        "for m in pkgutil.iter_modules(p.__path__): importlib.import_module(f'{p.__name__}.{m.name}')\n"
        f"print(*(m for m in {FORBIDDEN!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
