"""How engines and ranks reach GPS: Read as a lease that ends with the block, Write as begin, copy, commit.

async with client.read(ReadRequest(model="policy", receiver="rollout-0")) as grant:
    pool = map_view(grant.view)
    ...copy out of pool...          # the version stays until the block ends
# raises Conflict if the lease ran out meanwhile: what was copied may be torn, Read again

grant = await client.begin_write(WriteRequest(model="policy", version=7, writer="rank-0", ...))
...copy into map_view(grant.view, writable=True)...
status = await client.commit_write(grant.write_id, WriteCommit(writer="rank-0", checksums=...))
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from shared.contracts.base import Message
from shared.contracts.gps import (
    ModelStatus,
    ReadGrant,
    ReadRequest,
    ReceiverRequest,
    ReceiverStatus,
    WriteCommit,
    WriteGrant,
    WriteRequest,
    WriteStatus,
)
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PivotError,
    TransportError,
    WireError,
    from_wire,
)

M = TypeVar("M", bound=Message)
_MODELS = TypeAdapter(tuple[ModelStatus, ...])
_RELEASE_DEADLINE_S = 10.0


class GpsClient:
    """A client of the node's GPS at `base_url`. `name` appears in errors. Errors of GPS arrive as their own
    classes.

    Raises, from every call:
        DeadlineExceeded: no answer in time.
        TransportError: GPS cannot be reached.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        name: str = "client",
        deadline_s: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._name, self._deadline_s = name, deadline_s
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> "GpsClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def models(self) -> tuple[ModelStatus, ...]:
        """What the pool holds."""
        response = await self._send("GET", "/v1/models", None, "models", self._deadline_s)
        return _MODELS.validate_python(response)

    async def model(self, name: str) -> ModelStatus:
        """One model. Raises NotFound."""
        return await self._ask("GET", f"/v1/models/{name}", None, ModelStatus, "models", self._deadline_s)

    @contextlib.asynccontextmanager
    async def read(
        self, request: ReadRequest, *, deadline_s: float | None = None
    ) -> AsyncIterator[ReadGrant]:
        """A version that cannot change inside the block.

        Raises:
            NotFound: unknown model.
            InvalidRequest: a box outside its tensor.
            Conflict: `min_version` was not committed within `wait_s`; or, when the block ends without an
                error, the lease had run out inside it.
        """
        grant = await self._granted(request, self._limit(deadline_s, request.wait_s))
        try:
            yield grant
        except BaseException:
            with contextlib.suppress(PivotError):  # the block's error matters more
                await self.release(grant.lease_id)
            raise
        try:
            await self.release(grant.lease_id)
        except NotFound as error:
            raise Conflict(
                f"the lease on {grant.model} version {grant.version} ran out inside the read: "
                "what was read may be torn; Read again with a longer lease_s",
                model=grant.model,
                version=grant.version,
                lease_id=grant.lease_id,
            ) from error

    async def _granted(self, request: ReadRequest, limit_s: float) -> ReadGrant:
        """The grant; where the node holds only a shard, the receiver is registered at its first Read."""
        try:
            return await self._ask("POST", "/v1/read", request, ReadGrant, "read", limit_s)
        except InvalidRequest as error:
            if error.data.get("field") != "receiver":
                raise
        await self.register(request.receiver, ReceiverRequest(model=request.model, boxes=request.boxes))
        return await self._ask("POST", "/v1/read", request, ReadGrant, "read", limit_s)

    async def register(self, receiver: str, request: ReceiverRequest) -> ReceiverStatus:
        """A landing buffer for `receiver`, kept by the node. Raises NotFound, InvalidRequest, ConfigError."""
        path = f"/v1/receivers/{receiver}"
        return await self._ask("PUT", path, request, ReceiverStatus, "register", self._deadline_s)

    async def release(self, lease_id: str) -> None:
        """Give a lease back. Raises NotFound if it ran out."""
        await self._send("DELETE", f"/v1/read/{lease_id}", None, "release", _RELEASE_DEADLINE_S)

    async def begin_write(self, request: WriteRequest, *, deadline_s: float | None = None) -> WriteGrant:
        """The spare buffer for version `request.version`.

        Raises:
            Conflict: the version is not newer than the readable one, or readers kept the spare buffer for
            `wait_s`. InvalidRequest: names the bad box; or all writers' boxes together do not cover every
            tensor exactly once.
        """
        limit = self._limit(deadline_s, request.wait_s)
        return await self._ask("POST", "/v1/writes", request, WriteGrant, "begin write", limit)

    async def commit_write(
        self, write_id: str, commit: WriteCommit, *, deadline_s: float | None = None
    ) -> WriteStatus:
        """Say that this writer's bytes are in place; the last one flips the version.

        Raises:
            NotFound: the Write is gone, replaced by restarted writers.
            InvalidRequest: a checksum differs from what is in the buffer.
        """
        limit = self._limit(deadline_s, 0.0)
        path = f"/v1/writes/{write_id}/commit"
        return await self._ask("POST", path, commit, WriteStatus, "commit write", limit)

    async def write_status(self, write_id: str) -> WriteStatus:
        """Who is still to commit. Raises NotFound."""
        path = f"/v1/writes/{write_id}"
        return await self._ask("GET", path, None, WriteStatus, "write status", self._deadline_s)

    async def abandon_write(self, write_id: str) -> None:
        """Drop a Write; the readable version stays. Raises NotFound."""
        await self._send("DELETE", f"/v1/writes/{write_id}", None, "abandon write", self._deadline_s)

    def _limit(self, deadline_s: float | None, wait_s: float) -> float:
        return (self._deadline_s if deadline_s is None else deadline_s) + wait_s

    async def _ask(
        self, method: str, path: str, body: Message | None, reply: type[M], phase: str, limit_s: float
    ) -> M:
        answer = await self._send(method, path, body, phase, limit_s)
        try:
            return reply.model_validate(answer)
        except ValidationError as error:
            raise WireError(
                f"GPS answered {path} with something that is no {reply.__name__}: {error}"
            ) from error

    async def _send(self, method: str, path: str, body: Message | None, phase: str, limit_s: float) -> Any:
        content = None if body is None else body.model_dump_json().encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = await self._http.request(
                method, path, content=content, headers=headers, timeout=httpx.Timeout(limit_s)
            )
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(role=self._name, peer="gps", phase=phase, deadline_s=limit_s) from error
        except httpx.HTTPError as error:
            raise TransportError(f"GPS at {self._http.base_url} cannot be reached: {error}") from error
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        try:
            answer = response.json()
        except ValueError as error:
            raise WireError(f"GPS answered {path} with status {response.status_code} and no JSON") from error
        if response.is_error:
            wire = answer if isinstance(answer, dict) and "code" in answer else {"message": str(answer)}
            raise from_wire(wire)
        return answer
