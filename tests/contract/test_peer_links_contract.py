"""A transport for asyncio: copies from several peers at once, lists prepared once, nothing waits for ever."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

import numpy as np
import pytest

from shared.contracts.gps import PeerInfo
from shared.errors import DeadlineExceeded, TransportError
from shared.weights.host_pool import HostPool
from shared.weights.memory_transport import MemoryTransport
from shared.weights.peer_links import PeerLinks, Pull
from shared.weights.ports import Operation, memory_of
from shared.weights.transports import open_transport

SIZE = 1 << 18
LOOK_S = 0.1
"""How long a look at copies keeps the thread where nobody else wants it."""


@dataclass
class Reader:
    """A reader with "landing", and the stores it reads from: each pool is full of its number plus one."""

    links: PeerLinks
    landing: np.ndarray
    stores: list[PeerLinks] = field(default_factory=list)
    infos: list[PeerInfo] = field(default_factory=list)

    def pull(self, store: int, at: int = 0, key: str = "k", nbytes: int = SIZE // 4) -> Pull:
        spans = np.array([[0, nbytes]], np.int64)
        target = np.array([[at, nbytes]], np.int64)
        return Pull(self.infos[store], f"pool-{store}", spans, "landing", target, key)


@pytest.fixture(params=["memory", "nixl"])
async def reader(request: pytest.FixtureRequest) -> AsyncIterator[Reader]:
    if request.param == "nixl":
        pytest.importorskip("nixl._api")
    make = partial(open_transport, request.param)
    host = HostPool(run=f"links{os.getpid()}", node=0, budget_bytes=1 << 24)
    name = uuid4().hex[:6]
    made = Reader(PeerLinks(lambda: make(f"reader-{name}"), "reader"), np.zeros(SIZE, np.uint8))
    try:
        await made.links.start()
        await made.links.register("landing", memory_of(made.landing))
        for number in range(3):
            store = PeerLinks(lambda number=number: make(f"store-{number}-{name}"), f"store-{number}")  # type: ignore[misc]
            await store.start()
            region = host.create("policy", f"b{number}", SIZE)
            region.memory[:] = number + 1
            await store.register(f"pool-{number}", memory_of(region.memory, str(region.path)))
            made.stores.append(store)
            made.infos.append(await store.describe())
        yield made
    finally:
        for links in (made.links, *made.stores):
            await links.close()
        host.close()


async def test_copies_from_several_peers_arrive_together(reader: Reader) -> None:
    quarter = SIZE // 4
    copied = await reader.links.pull([reader.pull(n, n * quarter) for n in range(3)], 10)
    assert copied == 3 * quarter
    assert [int(reader.landing[n * quarter]) for n in range(4)] == [1, 2, 3, 0]
    assert (reader.landing[: 3 * quarter].reshape(3, -1) == [[1], [2], [3]]).all()


async def test_lists_are_prepared_once_per_key(reader: Reader) -> None:
    for _ in range(5):
        await reader.links.pull([reader.pull(0), reader.pull(1, SIZE // 4)], 10)
    assert reader.links.num_lists == 2
    await reader.links.pull([reader.pull(0, SIZE // 2, key="other")], 10)
    assert reader.links.num_lists == 3


async def test_concurrent_pulls_do_not_disturb_each_other(reader: Reader) -> None:
    quarter = SIZE // 4
    await asyncio.gather(
        *(
            reader.links.pull([reader.pull(n, n * quarter, key=f"{n}{i}")], 10)
            for n in range(3)
            for i in range(8)
        )
    )
    assert (reader.landing[: 3 * quarter].reshape(3, -1) == [[1], [2], [3]]).all()


async def test_forgotten_peer_and_unregistered_region_take_their_lists_along(reader: Reader) -> None:
    await reader.links.pull([reader.pull(0), reader.pull(1, SIZE // 4)], 10)
    await reader.links.forget(reader.infos[0].agent)
    assert reader.links.num_lists == 1
    await reader.links.pull([reader.pull(0)], 10)
    await reader.links.unregister("landing")
    assert reader.links.num_lists == 0
    with pytest.raises(TransportError, match="not registered"):
        await reader.links.pull([reader.pull(0)], 10)
    await reader.links.register("landing", memory_of(reader.landing))
    await reader.links.pull([reader.pull(0)], 10)


async def test_region_that_a_peer_does_not_have_blames_the_peer(reader: Reader) -> None:
    bad = reader.pull(2)
    wrong = Pull(bad.peer, "nothing", bad.theirs, bad.local_region, bad.ours, "x")
    with pytest.raises(TransportError) as caught:
        await reader.links.pull([reader.pull(0, SIZE // 4), wrong], 10)
    assert caught.value.data["peer"] == reader.infos[2].agent
    await reader.links.pull([reader.pull(0), reader.pull(2, SIZE // 4)], 10)
    assert int(reader.landing[SIZE // 4]) == 3


async def test_peer_that_restarted_is_connected_anew(reader: Reader) -> None:
    await reader.links.pull([reader.pull(0)], 10)
    extra = np.full(SIZE, 9, np.uint8)
    await reader.stores[0].unregister("pool-0")
    host = HostPool(run=f"links{os.getpid()}", node=1, budget_bytes=1 << 24)
    try:
        region = host.create("policy", "b9", SIZE)
        region.memory[:] = extra
        await reader.stores[0].register("pool-0", memory_of(region.memory, str(region.path)))
        reader.infos[0] = await reader.stores[0].describe()
        await reader.links.pull([reader.pull(0)], 10)
        assert int(reader.landing[0]) == 9
        await reader.links.forget(reader.infos[0].agent)
        await reader.stores[0].unregister("pool-0")
    finally:
        host.close()


class Endless(MemoryTransport):
    """A peer that never answers: no copy of it ends."""

    def poll(self, operation: Operation) -> bool:
        return False


async def test_copy_that_does_not_end_is_given_up_and_names_the_peer() -> None:
    host = HostPool(run=f"links{os.getpid()}", node=2, budget_bytes=1 << 24)
    links, store = PeerLinks(lambda: Endless("reader"), "reader"), MemoryTransport("store")
    try:
        region = host.create("policy", "b0", SIZE)
        store.register("pool", memory_of(region.memory, str(region.path)))
        await links.start()
        landing = np.zeros(SIZE, np.uint8)
        await links.register("landing", memory_of(landing))
        spans = np.array([[0, 8]], np.int64)
        with pytest.raises(DeadlineExceeded, match=r"no answer from store in phase 'copy' within 0\.05 s"):
            await links.pull([Pull(store.describe(), "pool", spans, "landing", spans, "k")], 0.05)
        assert links.num_lists == 0, "the peer was forgotten"
    finally:
        await links.close()
        store.close()
        host.close()


async def test_copy_that_takes_long_leaves_the_thread_to_others() -> None:
    host = HostPool(run=f"links{os.getpid()}", node=3, budget_bytes=1 << 24)
    links, store = PeerLinks(lambda: Endless("reader"), "reader"), MemoryTransport("store")
    try:
        region = host.create("policy", "b0", SIZE)
        store.register("pool", memory_of(region.memory, str(region.path)))
        await links.start()
        await links.register("landing", memory_of(np.zeros(SIZE, np.uint8)))
        spans = np.array([[0, 8]], np.int64)
        pulls = [[Pull(store.describe(), "pool", spans, "landing", spans, key)] for key in "ab"]
        pulling = [asyncio.create_task(links.pull(pull, 60)) for pull in pulls]
        while links.num_lists < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        begin_s = time.monotonic()
        for _ in range(50):
            await links.describe()
        assert time.monotonic() - begin_s < 50 * LOOK_S / 2, "each would wait for a whole look"
        for task in pulling:
            task.cancel()
        assert {type(end) for end in await asyncio.gather(*pulling, return_exceptions=True)} == {
            asyncio.CancelledError
        }
    finally:
        await links.close()
        store.close()
        host.close()


async def test_links_that_are_closed_say_so() -> None:
    links = PeerLinks(lambda: MemoryTransport("a"), "a")
    with pytest.raises(TransportError, match="not open"):
        await links.describe()
    await links.close()
