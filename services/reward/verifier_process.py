"""`verify` in a process of its own: a symbolic comparison may never end, and would take the whole service
along.

    service ─ one JSON line: task, response ─► child ─ one JSON line: value, or error ─► service no answer
    within VERIFY_DEADLINE_S → the child is killed, the sample is unscored, the next one gets a new child
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from services.reward.verifiers import verify
from shared.errors import DeadlineExceeded, EngineError, PivotError, from_wire
from shared.runtime.supervisor import die_with_parent

VERIFY_DEADLINE_S = 15.0
START_DEADLINE_S = 60.0
MAX_LINE_BYTES = 64 << 20


class VerifierProcess:
    """One child, started when first needed; calls take turns."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self.num_killed = 0

    async def verify(self, task: Mapping[str, Any], response: str) -> float:
        """
        Raises:
            PivotError: the task is unknown or malformed.
            DeadlineExceeded: the comparison does not end.
            EngineError: the child died over it.
        """
        async with self._turn:
            try:
                answer = await self._ask(json.dumps({"task": dict(task), "response": response}))
            except TimeoutError:
                await self._kill()
                raise DeadlineExceeded(
                    role="reward", peer="verifier", phase="verify", deadline_s=VERIFY_DEADLINE_S
                ) from None
            except BaseException:  # its answer would be taken for that of the next call
                await self._kill()
                raise
        if "error" in answer:
            raise from_wire(answer["error"])
        return float(answer["value"])

    async def close(self) -> None:
        async with self._turn:
            await self._kill()

    async def _ask(self, line: str) -> dict[str, Any]:
        child = self._child
        if child is None or child.returncode is not None:
            child = self._child = await self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(VERIFY_DEADLINE_S):
            await child.stdin.drain()
            answer = await child.stdout.readline()
        if not answer:
            raise EngineError("the verifier process died")
        values: dict[str, Any] = json.loads(answer)
        return values

    async def _start(self) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.reward.verifier_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            preexec_fn=die_with_parent,
        )
        assert child.stdout is not None
        async with asyncio.timeout(START_DEADLINE_S):
            await child.stdout.readline()
        return child

    async def _kill(self) -> None:
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
            self.num_killed += 1
        await self._child.wait()
        self._child = None


def main() -> None:
    """The child. Whatever libraries print goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": verify(request["task"], request["response"])}
        except PivotError as error:
            answer = {"error": error.to_wire()}
        except Exception as error:  # a library's; the sample is to blame, not the process
            answer = {"error": {"code": "internal", "message": f"{type(error).__name__}: {error}"}}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
