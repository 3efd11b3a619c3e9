"""Raw NIXL between two processes.

    python nixl_peer.py offer VIEW_JSON     offers a pool region: prints its `PeerInfo` as a line of JSON
    python nixl_peer.py take                reads a `PeerInfo`, then for each further line, a number of bytes,
                                            those in one descriptor: prints the seconds it took

Both live until their input ends. An address and a folder for UCX's log may follow: then UCX is set up as the
service does for TCP, on the interface of that address.
"""

import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from shared.contracts.gps import PeerInfo, PoolView
from shared.layout.spans import Spans
from shared.weights.mapped_pool import map_view
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import Descriptors, memory_of
from shared.weights.ucx import set_environment

DEADLINE_S = 60.0
_NUMBERS = itertools.count()


def quiet() -> None:
    """NIXL logs to standard output, where our JSON goes."""
    import nixl._api  # noqa: F401

    logging.getLogger("nixl").setLevel(logging.WARNING)


class NixlLink:
    """NIXL from the pool region of another process into `target`. `tls` is UCX_TLS; "" lets UCX choose."""

    def __init__(self, view: PoolView, target: np.ndarray, tls: str) -> None:
        # other interfaces may come and go while this runs; what starts later must not be told the same
        chosen = {"UCX_TLS": tls, "UCX_NET_DEVICES": "lo"} if tls else {}
        self._before = {name: os.environ.get(name) for name in chosen}
        os.environ |= chosen
        self._peer = subprocess.Popen(
            [sys.executable, __file__, "offer", view.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._peer.stdout is not None
        while not (line := self._peer.stdout.readline()).startswith(b"{"):
            assert line, "the peer ended"
        self.info = PeerInfo.model_validate_json(line)
        quiet()
        self._transport = NixlTransport(f"reader-{os.getpid()}-{next(_NUMBERS)}", has_progress_thread=False)
        self._transport.register("target", memory_of(target))
        self._transport.connect(self.info)

    def prepare(self, here: Spans, there: Spans) -> tuple[Descriptors, Descriptors]:
        return (
            self._transport.prepare_local("target", here),
            self._transport.prepare_remote(self.info.agent, "pool", there),
        )

    def read(self, ends: tuple[Descriptors, Descriptors]) -> None:
        self._transport.wait(self._transport.read(*ends), DEADLINE_S)

    def close(self) -> None:
        self._transport.close()
        for name, value in self._before.items():
            del os.environ[name]
            os.environ |= {name: value} if value is not None else {}
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        self._peer.wait(30)


@contextlib.contextmanager
def nixl_link(view: PoolView, target: np.ndarray, tls: str = "") -> Iterator[NixlLink]:
    link = NixlLink(view, target, tls)
    try:
        yield link
    finally:
        link.close()


def offer(view: PoolView) -> None:
    pool = map_view(view, writable=True)
    transport = NixlTransport(f"store-{os.getpid()}")
    transport.register("pool", memory_of(pool.memory, view.path))
    print(transport.describe().model_dump_json(), flush=True)
    sys.stdin.read()
    transport.close()


def take() -> None:
    quiet()
    peer = PeerInfo.model_validate_json(sys.stdin.readline())
    target = np.ones(peer.regions[0].nbytes, np.uint8)
    transport = NixlTransport(f"reader-{os.getpid()}", has_progress_thread=False)
    transport.register("target", memory_of(target))
    transport.connect(peer)
    known: dict[int, tuple[Descriptors, Descriptors]] = {}
    for line in sys.stdin:
        nbytes = int(line)
        if nbytes not in known:
            one = np.array([[0, nbytes]], np.int64)
            here = transport.prepare_local("target", one)
            known[nbytes] = here, transport.prepare_remote(peer.agent, "pool", one)
        ends = known[nbytes]
        begin = time.perf_counter()
        transport.wait(transport.read(*ends), DEADLINE_S)
        print(json.dumps(time.perf_counter() - begin), flush=True)
    transport.close()


def main() -> None:
    what, *words = sys.argv[1:]
    view = PoolView.model_validate_json(words.pop(0)) if what == "offer" else None
    if words:
        address, folder = words
        set_environment("tcp", address, Path(folder) / f"ucx-raw-{os.getpid()}.log")
    if view is not None:
        offer(view)
    else:
        take()


if __name__ == "__main__":
    main()
