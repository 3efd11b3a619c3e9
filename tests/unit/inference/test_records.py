"""What a sequence record makes of deltas that come late, twice, out of order, or after a restart."""

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.replica import TokenDelta
from shared.inference.records import SequenceRecord
from tests.support.cluster import record

LENGTH = 30


def delta(start: int, end: int, *, attempt: int = 0, is_last: bool = False, salt: int = 0) -> TokenDelta:
    """Token i is i, made by version i // 7."""
    positions = range(start, end)
    versions: list[tuple[int, int]] = []
    for i in positions:
        if versions and versions[-1][0] == i // 7:
            versions[-1] = (i // 7, versions[-1][1] + 1)
        else:
            versions.append((i // 7, 1))
    return TokenDelta(
        sequence_id="s",
        attempt=attempt,
        start=start,
        token_ids=tuple(i + salt for i in positions),
        logprobs=tuple(-float(i) for i in positions),
        versions=tuple(versions),
        finish_reason="stop" if is_last else None,
    )


def check(kept: SequenceRecord) -> None:
    """Tokens from the first on without a gap, each with its own logprob and version."""
    assert kept.token_ids == list(range(kept.num_tokens))
    assert kept.logprobs == [-float(i) for i in range(kept.num_tokens)]
    unrolled = [version for version, count in kept.versions for _ in range(count)]
    assert unrolled == [i // 7 for i in range(kept.num_tokens)]
    assert all(count > 0 for _, count in kept.versions)
    assert len({version for version, _ in kept.versions}) == len(kept.versions)


pieces = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted), max_size=25)


@given(pieces)
def test_tokens_only_grow_and_never_have_a_gap(parts: list[list[int]]) -> None:
    kept = record("s")
    for start, end in parts:
        before = kept.num_tokens
        if kept.has_gap_before(delta(start, end)):
            assert start > before
            continue
        fresh = kept.extend(delta(start, end))
        assert kept.num_tokens == before + fresh == max(before, end)
        check(kept)


@given(pieces, st.booleans())
def test_restoring_from_the_stream_drops_what_leaves_a_gap(parts: list[list[int]], repeat: bool) -> None:
    kept = record("s")
    for start, end in parts * (1 + repeat):
        kept.restore(delta(start, end))
        check(kept)
    assert kept.num_tokens <= max((end for _, end in parts), default=0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, LENGTH), st.integers(0, LENGTH)), max_size=25))
def test_a_later_attempt_overrules_an_earlier_one(parts: list[tuple[int, int, int]]) -> None:
    """Tokens differ between attempts: what is kept is a prefix of one attempt upon a prefix of earlier
    ones."""
    kept, newest = record("s"), 0
    for attempt, start, end in parts:
        part = delta(min(start, end), max(start, end), attempt=attempt, salt=1000 * attempt)
        before = list(kept.token_ids)
        kept.restore(part)
        if attempt < newest:
            assert kept.token_ids == before
        newest = max(newest, attempt)
        assert kept.attempt == newest
        attempts = [token // 1000 for token in kept.token_ids]
        assert attempts == sorted(attempts)
        assert [token % 1000 for token in kept.token_ids] == list(range(kept.num_tokens))
        assert sum(count for _, count in kept.versions) == kept.num_tokens == len(kept.logprobs)


def test_the_end_counts_only_if_every_token_before_it_is_here() -> None:
    kept = record("s")
    kept.restore(delta(5, 9, is_last=True))
    assert kept.finish_reason is None
    kept.extend(delta(0, 7))
    kept.extend(delta(5, 9, is_last=True))
    assert (kept.num_tokens, kept.finish_reason) == (9, "stop")


def test_an_end_without_tokens_ends_the_sequence() -> None:
    kept = record("s")
    kept.extend(delta(0, 4))
    assert kept.extend(delta(4, 4, is_last=True)) == 0
    assert kept.finish_reason == "stop"


def test_a_new_attempt_takes_back_the_end_of_an_old_one() -> None:
    kept = record("s")
    kept.restore(delta(0, 9, is_last=True))
    kept.restore(delta(4, 6, attempt=1))
    assert (kept.num_tokens, kept.finish_reason) == (6, None)


def test_a_spec_resumes_after_the_tokens_here() -> None:
    kept = record("s", max_new_tokens=20)
    kept.extend(delta(0, 4))
    spec = kept.spec(7)
    assert (spec.attempt, spec.generated_token_ids, spec.sampling.max_new_tokens) == (7, (0, 1, 2, 3), 20)
