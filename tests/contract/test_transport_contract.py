"""What every transport must do; run on the in-memory one, and on NIXL over UCX with host memory: of two
agents, and of one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import numpy as np
import pytest

from shared.contracts.gps import PeerInfo
from shared.errors import DeadlineExceeded, TransportError
from shared.weights.host_pool import HostPool
from shared.weights.memory_transport import MemoryTransport
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import Descriptors, Memory, Transport, memory_of
from shared.weights.split_transport import SplitTransport
from shared.weights.transports import open_transport

SIZE = 1 << 20


def make_memory(name: str) -> Transport:
    return open_transport("memory", name)


def make_nixl(name: str) -> Transport:
    pytest.importorskip("nixl._api")
    return open_transport("nixl", name)


def make_one_agent(name: str) -> Transport:
    """As where RDMA carries the bytes."""
    pytest.importorskip("nixl._api")
    return NixlTransport(name)


@dataclass
class Ends:
    """`store` owns the pool region "pool" (bytes 0..250 repeating); `peer` has "staging", zeroed, and knows
    it."""

    store: Transport
    peer: Transport
    pool: np.ndarray
    staging: np.ndarray
    make: Callable[[str], Transport]


@pytest.fixture(params=[make_memory, make_nixl, make_one_agent], ids=["memory", "nixl", "one agent"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    make: Callable[[str], Transport] = request.param
    host = HostPool(run=f"contract{os.getpid()}", node=0, budget_bytes=1 << 26)
    with contextlib.ExitStack() as stack:
        stack.callback(host.close)
        region = host.create("policy", "b0", SIZE)
        region.memory[:] = np.arange(SIZE, dtype=np.uint64) % 251
        staging = np.zeros(SIZE, np.uint8)
        store, peer = make(f"store-{uuid4().hex[:6]}"), make(f"peer-{uuid4().hex[:6]}")
        stack.callback(store.close)
        stack.callback(peer.close)
        store.register("pool", memory_of(region.memory, str(region.path)))
        peer.register("staging", memory_of(staging))
        peer.connect(store.describe())
        yield Ends(store, peer, region.memory, staging, make)


def spans(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def agent_of(transport: Transport) -> str:
    return transport.describe().agent


def test_read_brings_exactly_the_bytes_of_each_span(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans((0, 100), (1000, 7), (1007, 3)))
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans((500, 100), (64, 7), (71, 3)))
    ends.peer.wait(ends.peer.read(local, remote), 10)
    expected = np.zeros(SIZE, np.uint8)
    expected[0:100] = ends.pool[500:600]
    expected[1000:1010] = ends.pool[64:74]
    assert np.array_equal(ends.staging, expected)


def test_write_changes_exactly_the_bytes_of_each_span(ends: Ends) -> None:
    before = ends.pool.copy()
    ends.staging[:] = 255
    local = ends.peer.prepare_local("staging", spans((0, 4096), (9000, 5)))
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans((4096, 4096), (1, 5)))
    operation = ends.peer.write(local, remote)
    ends.peer.wait(operation, 10)
    before[4096:8192] = 255
    before[1:6] = 255
    assert np.array_equal(ends.pool, before)
    assert operation.nbytes == 4101


def test_prepared_lists_serve_many_copies(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans((0, 10), (50, 10)))
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans((0, 10), (20, 10)))
    for value in range(5):
        ends.pool[:30] = value
        ends.peer.wait(ends.peer.read(local, remote), 10)
        assert (ends.staging[:10] == value).all()
        assert (ends.staging[50:60] == value).all()
    ends.peer.release(local)
    ends.peer.release(remote)


def test_thousands_of_spans_arrive_bit_exact(ends: Ends) -> None:
    offsets = np.random.default_rng(0).permutation(SIZE // 64)[:5000] * 64
    far = np.stack([offsets, np.full(5000, 48)], axis=1).astype(np.int64)
    near = np.stack([np.arange(5000) * 48, np.full(5000, 48)], axis=1).astype(np.int64)
    local = ends.peer.prepare_local("staging", near)
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", far)
    ends.peer.wait(ends.peer.read(local, remote), 30)
    rows = ends.staging[: 5000 * 48].reshape(5000, 48)
    assert np.array_equal(rows, ends.pool[offsets[:, None] + np.arange(48)])


def test_empty_copy_is_done_at_once(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans())
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans())
    ends.peer.wait(ends.peer.read(local, remote), 1)


def test_waiting_again_for_a_done_copy_returns(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans((0, 8)))
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans((0, 8)))
    operation = ends.peer.read(local, remote)
    ends.peer.wait(operation, 10)
    ends.peer.wait(operation, 10)


@pytest.mark.parametrize("bad", [(SIZE - 4, 5), (-1, 4), (SIZE, 1)])
def test_span_outside_its_region_is_refused(ends: Ends, bad: tuple[int, int]) -> None:
    with pytest.raises(TransportError, match="outside region"):
        ends.peer.prepare_local("staging", spans(bad))
    with pytest.raises(TransportError, match="outside region"):
        ends.peer.prepare_remote(agent_of(ends.store), "pool", spans(bad))


def test_unknown_regions_and_peers_are_refused(ends: Ends) -> None:
    with pytest.raises(TransportError, match="not registered"):
        ends.peer.prepare_local("nothing", spans((0, 1)))
    with pytest.raises(TransportError, match="is known"):
        ends.peer.prepare_remote(agent_of(ends.store), "nothing", spans((0, 1)))
    with pytest.raises(TransportError, match="is known"):
        ends.peer.prepare_remote("nobody", "pool", spans((0, 1)))


def test_ends_of_different_lengths_are_refused(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans((0, 8)))
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans((0, 9)))
    with pytest.raises(TransportError, match="ends of a copy differ"):
        ends.peer.read(local, remote)


def test_a_name_is_registered_once_and_again_after_unregistering(ends: Ends) -> None:
    memory = memory_of(ends.staging)
    with pytest.raises(TransportError, match="registered already"):
        ends.peer.register("staging", memory)
    ends.peer.unregister("staging")
    ends.peer.register("staging", memory)
    test_waiting_again_for_a_done_copy_returns(ends)


def test_region_registered_later_is_seen_after_describing_again(ends: Ends) -> None:
    host = HostPool(run=f"contract{os.getpid()}", node=1, budget_bytes=1 << 20)
    try:
        region = host.create("policy", "b1", 4096)
        region.memory[:] = 7
        ends.store.register("later", memory_of(region.memory, str(region.path)))
        ends.peer.connect(ends.store.describe())
        local = ends.peer.prepare_local("staging", spans((0, 4096)))
        remote = ends.peer.prepare_remote(agent_of(ends.store), "later", spans((0, 4096)))
        ends.peer.wait(ends.peer.read(local, remote), 10)
        assert (ends.staging[:4096] == 7).all()
        ends.store.unregister("later")
    finally:
        host.close()


def test_deadline_that_passed_is_an_error_that_names_the_peer(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans(*[(i * 16, 8) for i in range(20_000)]))
    remote = ends.peer.prepare_remote(
        agent_of(ends.store), "pool", spans(*[(i * 24, 8) for i in range(20_000)])
    )
    operation = ends.peer.read(local, remote)
    missed = None
    try:
        ends.peer.wait(operation, 0.0)
    except DeadlineExceeded as error:
        missed = error
    if missed:
        assert (missed.data["peer"], missed.data["phase"]) == (agent_of(ends.store), "copy")
    # a transport that was already done may say so; either way the next copy works
    test_waiting_again_for_a_done_copy_returns(ends)


def test_close_twice_then_every_use_is_refused(ends: Ends) -> None:
    transport = ends.make("short-lived")
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.describe()
    with pytest.raises(TransportError, match="closed"):
        transport.register("x", memory_of(np.zeros(8, np.uint8)))


def test_peer_of_another_transport_or_gone_is_refused(ends: Ends) -> None:
    info = ends.store.describe()
    ends.peer.disconnect(info.agent)
    with pytest.raises(TransportError, match="is known"):
        ends.peer.prepare_remote(info.agent, "pool", spans((0, 1)))
    ends.peer.connect(info)
    test_waiting_again_for_a_done_copy_returns(ends)


def test_looking_at_a_copy_ends_with_it_done(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans((0, SIZE)))
    remote = ends.peer.prepare_remote(agent_of(ends.store), "pool", spans((0, SIZE)))
    operation = ends.peer.read(local, remote)
    for _ in range(100_000):
        if ends.peer.poll(operation):
            break
    assert np.array_equal(ends.staging, ends.pool)
    assert ends.peer.poll(operation), "looking again says so again"
    ends.peer.cancel(operation)
    ends.peer.wait(operation, 1)


def test_cancelled_copy_is_over_and_the_next_one_works(ends: Ends) -> None:
    local = ends.peer.prepare_local("staging", spans(*[(i * 16, 8) for i in range(20_000)]))
    remote = ends.peer.prepare_remote(
        agent_of(ends.store), "pool", spans(*[(i * 24, 8) for i in range(20_000)])
    )
    ends.peer.cancel(ends.peer.read(local, remote))
    ends.peer.disconnect(agent_of(ends.store))
    ends.peer.progress()
    ends.peer.connect(ends.store.describe())
    test_waiting_again_for_a_done_copy_returns(ends)


def test_explains_itself_in_one_line(ends: Ends) -> None:
    line = ends.peer.explain()
    assert line.startswith(ends.peer.describe().transport)
    assert "\n" not in line


def test_non_contiguous_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        memory_of(np.zeros((4, 4), np.uint8)[:, :2])


def test_memory_transport_refuses_gpu_memory_and_anonymous_peers() -> None:
    store, peer = MemoryTransport("a"), MemoryTransport("b")
    with pytest.raises(TransportError, match="host memory only"):
        store.register("gpu", Memory(1 << 30, 16, "VRAM"))
    store.register("private", memory_of(np.zeros(8, np.uint8)))
    peer.connect(store.describe())
    with pytest.raises(TransportError, match="not a pool file"):
        peer.prepare_remote("a", "private", spans((0, 1)))


def copy_until_it_fails(peer: Transport, local: Descriptors, remote: Descriptors) -> None:
    """A dead peer shows at the first copy that needs it; pages it shared may serve one more."""
    for _ in range(50):
        peer.wait(peer.read(local, remote), 5)


PEER_PROCESS = """
import sys
import numpy as np
from shared.weights.nixl_transport import NixlTransport
from shared.weights.ports import memory_of
transport = NixlTransport("other-process")
memory = np.full(1 << 20, 42, np.uint8)
transport.register("pool", memory_of(memory))
print(transport.describe().model_dump_json(), flush=True)
sys.stdin.read()
"""


def test_nixl_between_processes_and_a_peer_that_dies_is_an_error() -> None:
    pytest.importorskip("nixl._api")
    peer = NixlTransport("this-process")
    staging = np.zeros(1 << 20, np.uint8)
    peer.register("staging", memory_of(staging))
    process = subprocess.Popen(
        [sys.executable, "-c", PEER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
    )
    try:
        assert process.stdout is not None
        line = next(text for text in process.stdout if text.startswith("{"))
        peer.connect(PeerInfo.model_validate_json(line))
        local = peer.prepare_local("staging", spans((0, 1 << 20)))
        remote = peer.prepare_remote("other-process", "pool", spans((0, 1 << 20)))
        peer.wait(peer.read(local, remote), 20)
        assert (staging == 42).all()
        process.kill()
        process.wait()
        with pytest.raises(TransportError):
            copy_until_it_fails(peer, local, remote)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        peer.close()


def test_transport_that_must_have_rdma_refuses_a_node_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.weights.nixl_transport.rdma_devices", lambda: ())
    with pytest.raises(TransportError, match="no RDMA device"):
        open_transport("rdma", "a")


def test_memory_is_registered_with_both_agents_or_with_none() -> None:
    serving, pulling = MemoryTransport("a"), MemoryTransport("a/pull")
    split, memory = SplitTransport(serving, pulling), memory_of(np.zeros(8, np.uint8))
    pulling.register("x", memory)
    with pytest.raises(TransportError, match="registered already"):
        split.register("x", memory)
    assert split.describe().regions == ()
    pulling.unregister("x")
    split.register("x", memory)
    assert [len(side.describe().regions) for side in (serving, pulling)] == [1, 1]
    split.unregister("x")
    assert [len(side.describe().regions) for side in (serving, pulling)] == [0, 0]
