"""The FastAPI base of every service: `/healthz /readyz /metrics`, typed errors, bearer token on mutating
calls."""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from shared.errors import Conflict, DeadlineExceeded, NotFound, PivotError, UserError
from shared.runtime.metrics import Metrics

MAX_BODY_BYTES = 64 << 20
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


def make_app(
    service_name: str,
    *,
    token: str | None,
    routers: Sequence[APIRouter],
    ready: Callable[[], str | None],
    metrics: Metrics | None = None,
) -> FastAPI:
    """An app. `ready` gives None when ready, or what it waits for. With a `token`, calls other than GET need
    `Authorization: Bearer <token>`."""
    app = FastAPI(title=f"PivotRL {service_name}", version="1")
    own_metrics = metrics or Metrics(service_name)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.method not in _SAFE_METHODS:
            given = request.headers.get("authorization", "").encode()
            if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                return _error(
                    401, "unauthorized", "this call needs the run's bearer token (see run.json)", {}
                )
            if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
                return _error(413, "too_large", f"the body is over {MAX_BODY_BYTES} bytes", {})
        return await call_next(request)

    @app.exception_handler(PivotError)
    async def typed(_: Request, error: PivotError) -> JSONResponse:
        return _error(_status(error), error.code, error.message, error.data)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(422, "invalid_request", f"{field}: {first['msg']}", {"field": field})

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "service": service_name}

    @app.get("/readyz", tags=["health"])
    async def readyz() -> JSONResponse:
        waits_for = ready()
        if waits_for is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "waiting", "waits_for": waits_for}, status_code=503)

    @app.get("/metrics", tags=["health"])
    async def render_metrics() -> Response:
        return Response(own_metrics.render(), media_type="text/plain; version=0.0.4")

    for router in routers:
        app.include_router(router)
    return app


def _status(error: PivotError) -> int:
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Conflict):
        return 409
    if isinstance(error, UserError):
        return 400
    return 504 if isinstance(error, DeadlineExceeded) else 503


def _error(status: int, code: str, message: str, data: dict[str, object]) -> JSONResponse:
    return JSONResponse({"code": code, "message": message, "data": data}, status_code=status)


@contextlib.asynccontextmanager
async def serving(app: FastAPI, host: str, port: int) -> AsyncIterator[int]:
    """Serves `app` while the block runs; gives the port (0 picks a free one)."""
    # With the protocol named asyncio turns Nagle off, which costs 40 ms per POST.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # the process owns its signals
    task = asyncio.create_task(server._serve(sockets=[sock]))
    try:
        while not server.started and not task.done():  # noqa: ASYNC110  # uvicorn tells nobody
            await asyncio.sleep(0.005)
        yield int(sock.getsockname()[1])
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 3)
        sock.close()
