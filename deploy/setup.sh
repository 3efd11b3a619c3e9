#!/usr/bin/env bash
# setup.sh VENV: the pinned CPU set (or, with a requirements file as $2, another) in a new or existing environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv} lock=${2:-deploy/requirements-cpu.lock}
python=${PYTHON:-python3}
"$python" - <<'P' || { echo "PivotRL needs Python 3.11 (found $("$python" -V)); set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info[:2] != (3, 11))
P
command -v g++ >/dev/null || { echo "PivotRL needs g++: DeepSpeed compiles its CPU optimizer at first use (Debian: apt-get install g++)" >&2; exit 1; }
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo "PivotRL needs libnuma: vLLM on CPU links to it (Debian: apt-get install libnuma1)" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
quiet() { "$@" > "$venv/setup.log" 2>&1 || { tail -30 "$venv/setup.log" >&2; exit 1; }; }
echo "Installing the pinned CPU set into $venv (about 3 GB, a minute or two) ..."
quiet "$venv/bin/python" -m pip install --disable-pip-version-check "setuptools>=77,<82" wheel
torch=$(grep '^torch==' "$lock"); version=${torch#torch==}
if "$venv/bin/python" -m pip download -q --no-deps -d "$venv/.torch" "torch==${version%+*}+cpu" >/dev/null 2>&1; then
  rm -rf "$venv/.torch"
  sed "s/^torch==.*/torch==${version%+*}+cpu/" "$lock" > "$venv/lock.txt"
  quiet "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -r "$venv/lock.txt"
else                                    # pip knows no CPU build here: uv finds PyTorch's own index
  quiet "$venv/bin/python" -m pip install --disable-pip-version-check uv
  quiet "$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps --no-build-isolation --torch-backend=cpu -r "$lock"
fi
quiet "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
if [ -z "${NO_KERNELS:-}" ]; then       # else at first use: an image may run on another processor
  echo "Compiling DeepSpeed's optimizer (once, about a minute) ..."
  quiet "$venv/bin/python" -m services.trainer.kernels
  quiet "$venv/bin/python" -c "from shared.scheduling.migration import warm_up; warm_up()"  # ten seconds
fi
echo "Done."
