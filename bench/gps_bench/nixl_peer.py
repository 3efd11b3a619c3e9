"""A second process that offers one pool region over NIXL: the other node. `python nixl_peer.py VIEW_JSON`

Prints its `PeerInfo` as a line of JSON, and lives until its input ends.
"""

import contextlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from shared.contracts.gps import PeerInfo, PoolView
from shared.layout.spans import Spans
from shared.weights.mapped_pool import map_view
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import Descriptors, memory_of

DEADLINE_S = 60.0
_NUMBERS = itertools.count()


def quiet() -> None:
    """NIXL logs to standard output, where our JSON goes."""
    import nixl._api  # noqa: F401

    logging.getLogger("nixl").setLevel(logging.WARNING)


class NixlLink:
    """NIXL from the pool region of another process into `target`. `tls` is UCX_TLS; "" lets UCX choose."""

    def __init__(self, view: PoolView, target: np.ndarray, tls: str) -> None:
        if tls:  # other interfaces may come and go while this runs
            os.environ |= {"UCX_TLS": tls, "UCX_NET_DEVICES": "lo"}
        self._peer = subprocess.Popen(
            [sys.executable, __file__, view.model_dump_json()],
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


def main() -> None:
    view = PoolView.model_validate_json(sys.argv[1])
    pool = map_view(view, writable=True)
    transport = NixlTransport(f"store-{os.getpid()}")
    transport.register("pool", memory_of(pool.memory, view.path))
    print(transport.describe().model_dump_json(), flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main()
