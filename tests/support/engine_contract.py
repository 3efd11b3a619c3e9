"""What every `Engine` must do, as functions that any engine's tests call.

Each takes an engine that is awake on `first` at version 1 with nothing running, and leaves it so.
"""

from collections.abc import Iterable

import pytest

from shared.contracts.gps import PoolView
from shared.contracts.replica import SamplingSpec, SequenceSpec, TokenDelta
from shared.errors import EngineError, InvalidRequest
from shared.inference.ports import NO_VERSION, Engine

PROMPT = tuple(range(5, 25))


def spec(
    sequence_id: str,
    *,
    attempt: int = 0,
    generated: tuple[int, ...] = (),
    max_new_tokens: int = 24,
    temperature: float = 0.0,
    seed: int | None = None,
    prompt: tuple[int, ...] = PROMPT,
) -> SequenceSpec:
    """A greedy sequence by default."""
    return SequenceSpec(
        sequence_id=sequence_id,
        attempt=attempt,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        sampling=SamplingSpec(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed),
    )


def drain(engine: Engine) -> list[TokenDelta]:
    """Step until there is no work."""
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    return deltas


def tokens_of(deltas: Iterable[TokenDelta], sequence_id: str, start: int = 0) -> list[int]:
    """The tokens of one sequence, after checking that they leave no gap and repeat none."""
    tokens: list[int] = []
    for delta in deltas:
        if delta.sequence_id != sequence_id:
            continue
        assert delta.start == start + len(tokens)
        assert len(delta.logprobs) == len(delta.token_ids)
        assert sum(count for _, count in delta.versions) == len(delta.token_ids)
        assert all(logprob <= 0 for logprob in delta.logprobs)
        tokens += delta.token_ids
    return tokens


def generate(engine: Engine, sequence_id: str, **options: object) -> list[int]:
    engine.submit(spec(sequence_id, **options))  # type: ignore[arg-type]
    return tokens_of(drain(engine), sequence_id)


def check_generates(engine: Engine) -> None:
    """Sequences run side by side, each to its own length, and are forgotten when they end."""
    for i, length in enumerate((3, 9, 6)):
        engine.submit(spec(f"g{i}", max_new_tokens=length))
    running = engine.load_snapshot()
    assert running.num_running == 3
    assert running.lengths == (len(PROMPT),) * 3
    assert running.kv_capacity_tokens > 100
    deltas = drain(engine)
    for i, length in enumerate((3, 9, 6)):
        assert len(tokens_of(deltas, f"g{i}")) == length
        last = [delta for delta in deltas if delta.sequence_id == f"g{i}"][-1]
        assert last.finish_reason == "length"
        assert all(delta.versions == ((1, 1),) for delta in deltas)
    assert engine.load_snapshot().num_running == 0


def check_stops_at_a_stop_token(engine: Engine) -> None:
    """The stop token is handed out, and ends the sequence."""
    tokens = generate(engine, "stop")
    position = next(i for i in range(4, len(tokens)) if tokens[i] not in tokens[:i])
    stopping = spec("stop")
    sampling = stopping.sampling.model_copy(update={"stop_token_ids": (tokens[position],)})
    engine.submit(stopping.model_copy(update={"sampling": sampling}))
    deltas = drain(engine)
    assert tokens_of(deltas, "stop") == tokens[: position + 1]
    assert deltas[-1].finish_reason == "stop"


def check_abort_and_resume_is_seamless(engine: Engine) -> None:
    """Aborted twice and resumed: the parts joined equal the uninterrupted run."""
    whole = generate(engine, "whole")
    parts: list[int] = []
    for attempt, steps in enumerate((5, 7)):
        engine.submit(spec("whole", attempt=attempt, generated=tuple(parts)))
        engine.submit(spec("bystander", attempt=attempt, prompt=PROMPT[::-1]))
        deltas = [delta for _ in range(steps) for delta in engine.step()]
        rest = engine.abort([("whole", attempt), ("nobody", 0)])
        assert len(rest) == 1
        parts += tokens_of([*deltas, *rest], "whole", start=len(parts))
        drain(engine)
    assert 0 < len(parts) < len(whole)
    engine.submit(spec("whole", attempt=2, generated=tuple(parts)))
    parts += tokens_of(drain(engine), "whole", start=len(parts))
    assert parts == whole
    assert engine.abort([("whole", 2)]) == []


def check_resuming_a_finished_sequence_ends_at_once(engine: Engine) -> None:
    tokens = generate(engine, "end", max_new_tokens=4)
    engine.submit(spec("end", attempt=1, generated=tuple(tokens), max_new_tokens=4))
    (delta,) = drain(engine)
    assert (delta.start, delta.token_ids, delta.finish_reason) == (4, (), "length")


def check_refuses_what_cannot_run(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.submit(spec("huge", prompt=tuple([7] * 100_000)))
    assert not engine.has_work()


def check_sleep_frees_and_wake_restores(
    engine: Engine, first: PoolView, second: PoolView, min_freed_bytes: int
) -> None:
    """Tokens after a wake are those before; other weights give other tokens; the memory really comes back."""
    tokens = generate(engine, "nap")
    for _ in range(2):
        awake_bytes = engine.load_snapshot().resident_bytes
        freed = engine.sleep()
        asleep_bytes = engine.load_snapshot().resident_bytes
        assert freed >= min_freed_bytes
        assert asleep_bytes <= awake_bytes - min_freed_bytes
        assert engine.policy_version == NO_VERSION
        report = engine.wake(first, 1)
        assert report.read_bytes > 0
        assert engine.policy_version == 1
        assert generate(engine, "nap") == tokens
    engine.sleep()
    engine.wake(second, 2)
    assert engine.policy_version == 2
    generate(engine, "nap")
    engine.sleep()
    engine.wake(first, 1)
    assert generate(engine, "nap") == tokens


def check_refresh_keeps_running_sequences(engine: Engine, first: PoolView, second: PoolView) -> None:
    """Tokens drawn after the refresh carry the new version; the sequence loses none."""
    engine.submit(spec("live"))
    before = [delta for _ in range(6) for delta in engine.step()]
    engine.refresh(second, 2)
    assert engine.policy_version == 2
    assert engine.load_snapshot().num_running == 1
    after = drain(engine)
    assert {version for delta in before for version, _ in delta.versions} == {1}
    assert {version for delta in after for version, _ in delta.versions} == {2}
    assert len(tokens_of([*before, *after], "live")) == 24
    engine.refresh(first, 1)


def check_wrong_states_raise(engine: Engine, first: PoolView) -> None:
    with pytest.raises(EngineError, match="awake"):
        engine.wake(first, 1)
    engine.submit(spec("busy"))
    with pytest.raises(EngineError, match="run"):
        engine.sleep()
    engine.abort([("busy", 0)])
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.submit(spec("early"))
    with pytest.raises(EngineError, match="asleep"):
        engine.refresh(first, 1)
    assert engine.sleep() <= 1 << 20
    engine.wake(first, 1)
