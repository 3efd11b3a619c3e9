"""What a worker answers its engine: a value, or a failure told as one.

With several ranks vLLM's executor stops listening at the first that raises. What the ranks after it answer
stays queued, and the next call takes it for its own: it fails for a reason long past, or counts old figures.
So nothing that an engine calls on its workers may raise. Every rank answers, and the engine raises when it
has all answers::

    rank 0   {"failed": {"code": "not_found", ...}, "trace": ...}
    rank 1   {"value": (1544, 0.03)}                                 NotFound, with rank 0 in its data
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import EngineError, PivotError, from_wire

Answer = dict[str, Any]
"""`value`; or `failed`, an error of ours as it goes over the bus, or `broke`, any other one in words, both
with `trace`."""


def answer_of(call: Callable[[], Any]) -> Answer:
    """What `call` returned or raised, as plain values. The worker's half."""
    try:
        return {"value": call()}
    except PivotError as error:
        return {"failed": error.to_wire(), "trace": traceback.format_exc()}
    except Exception as error:
        return {"broke": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def values_of(answers: Sequence[Answer], phase: str) -> list[Any]:
    """The values by rank. The engine's half.

    Raises the error of the lowest rank that failed, once all have answered: one of ours as its own class and
    with its data, any other one as EngineError. Its data also name `rank` and `phase`, its notes hold the
    traces of all ranks that failed.
    """
    failed = {rank: answer for rank, answer in enumerate(answers) if "value" not in answer}
    if not failed:
        return [answer["value"] for answer in answers]
    rank, first = next(iter(failed.items()))
    if "failed" in first:
        error = from_wire(first["failed"])
    else:
        error = EngineError(f"rank {rank} failed in {phase}: {first['broke']}")
    error.data = {"rank": rank, "phase": phase} | error.data
    for other, answer in failed.items():
        error.add_note(f"rank {other} in {phase}:\n{answer['trace']}")
    raise error
