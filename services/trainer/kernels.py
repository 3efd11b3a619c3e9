"""Compiles what DeepSpeed wants compiled, once per environment.

python -m services.trainer.kernels          ahead of the first run; about a minute on two cores
"""

import contextlib
import fcntl
import os
import sys
from pathlib import Path

from shared.runtime.run_folder import KERNEL_CACHE


def build_kernels(kind: str) -> None:
    """Compiles what DeepSpeed wants compiled, or finds it compiled. One process at a time: a compiler that
    was killed leaves a lock file for which torch would wait for ever, and only under our own lock is it known
    to be a leftover."""
    # ninja takes what another version of it built for stale: always the one of this environment
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    with contextlib.ExitStack() as stack:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(Path(folder) / "pivotrl.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file unlocks
            for leftover in Path(folder).glob("**/lock"):
                leftover.unlink(missing_ok=True)
        if kind == "cuda":
            from deepspeed.ops.op_builder import FusedAdamBuilder

            FusedAdamBuilder().load(verbose=False)
        else:
            from deepspeed.ops.op_builder.cpu import FusedAdamBuilder, ShareMemCommBuilder

            FusedAdamBuilder().load(verbose=False)
            ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(KERNEL_CACHE))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    build_kernels(os.environ["DS_ACCELERATOR"])
