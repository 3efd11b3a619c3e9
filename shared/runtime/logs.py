"""JSON lines on standard error, each with the process name and the trace id of the message being handled."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar

_trace: ContextVar[str] = ContextVar("pivotrl_trace", default="")


def current_trace() -> str:
    """The trace id that outgoing messages carry on."""
    return _trace.get()


@contextlib.contextmanager
def trace_scope(trace: str) -> Iterator[None]:
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := current_trace():
            line["trace"] = trace
        if fields := getattr(record, "fields", None):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(process: str, level: str = "INFO") -> None:
    """Once per process, at its entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "vllm", "numba", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
