"""One thread for everything that blocks in an engine: calls run in the order given, while the event loop
lives on.

The thread is a daemon: a call that is stuck in a collective (its peers are dead) does not keep the process
alive.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._num_open = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._num_open == 0

    async def call(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` on the thread. A cancelled caller still waits: what the call uses must outlive it."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self._num_open += 1
        self._inbox.put((lambda: work(*args), answer))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait({answer})
            if not answer.cancelled():
                answer.exception()
            raise

    def _run(self) -> None:
        while True:
            work, answer = self._inbox.get()
            result, error = None, None
            try:
                result = work()
            except Exception as caught:
                error = caught
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._resolve, answer, result, error)

    def _resolve(self, answer: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
        self._num_open -= 1
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
