"""The one thread that touches an engine.

It alternates between steps and commands: between two steps it runs every command that waits, in order, and
with no work it blocks on the next command. Results and deltas reach the event loop in the order they
happened: whoever has awaited a command has already seen every delta of the steps before it.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.contracts.replica import TokenDelta
from shared.errors import EngineError
from shared.inference.ports import Engine, LoadSnapshot

T = TypeVar("T")
StepListener = Callable[[list[TokenDelta], LoadSnapshot], None]


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], Any]
    answer: "asyncio.Future[Any]"


class EngineThread:
    """Runs `engine` on a thread of its own for the event loop that calls `start`.

    `listener` is called on the event loop after every step and every command.
    """

    def __init__(self, engine: Engine, listener: StepListener, name: str) -> None:
        self._engine = engine
        self._listener = listener
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: asyncio.Future[None] | None = None
        """Resolves to the exception that ended the stepping; never to a result."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.failure = self._loop.create_future()
        self._thread.start()

    async def call(self, command: Callable[[], T]) -> T:
        """Run `command` between two steps.

        A cancelled caller still waits for a command to end, for the engine cannot be interrupted and what the
        command uses (a lease on a buffer) must outlive it.
        """
        assert self._loop is not None, "start first"
        if not self._thread.is_alive():
            raise EngineError("the engine thread has ended")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(_Command(command, answer))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait({answer})
            if not answer.cancelled():
                answer.exception()
            raise

    async def stop(self) -> None:
        """End the thread after the commands already given."""
        if self._thread.is_alive():
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while True:
                try:
                    command = self._inbox.get(block=not self._engine.has_work())
                except queue.Empty:
                    deltas = self._engine.step()
                    self._post(self._listener, deltas, self._engine.load_snapshot())
                    continue
                if command is None:
                    return
                self._answer(command)
        except Exception as error:
            self._post(self._fail, error)
        finally:
            self._refuse_rest()

    def _answer(self, command: _Command) -> None:
        try:
            result = command.run()
        except Exception as error:
            self._post(_resolve, command.answer, None, error)
        else:
            self._post(self._listener, [], self._engine.load_snapshot())
            self._post(_resolve, command.answer, result, None)

    def _refuse_rest(self) -> None:
        while True:
            try:
                command = self._inbox.get(block=False)
            except queue.Empty:
                return
            if command is not None:
                self._post(_resolve, command.answer, None, EngineError("the engine thread has ended"))

    def _fail(self, error: Exception) -> None:
        assert self.failure is not None
        if not self.failure.done():
            self.failure.set_exception(error)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _resolve(answer: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
