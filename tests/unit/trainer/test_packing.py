import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.packing import num_tokens, pad_with_empty, share_out, split
from shared.contracts.rank import TrainSample


def sample(index: int, tokens: int) -> TrainSample:
    response = max(1, tokens // 2)
    return TrainSample(
        sample_id=f"{index:08d}.00",
        prompt_token_ids=tuple(range(tokens - response)),
        response_token_ids=tuple(range(response)),
        logprobs=(-1.0,) * response,
        versions=((0, response),),
        advantage=0.5,
    )


def samples(lengths: list[int]) -> list[TrainSample]:
    return [sample(i, n) for i, n in enumerate(lengths)]


lengths = st.lists(st.integers(1, 300), max_size=40)


@given(lengths, st.integers(1, 6), st.integers(64, 512))
def test_every_sample_goes_to_one_rank(lengths: list[int], world_size: int, budget: int) -> None:
    shares = share_out(samples(lengths), world_size, budget)
    assert len(shares.samples) == world_size
    given_out = sorted(s.sample_id for share in shares.samples for s in share)
    assert given_out == [f"{i:08d}.00" for i in range(len(lengths))]


@given(lengths, st.integers(1, 6), st.integers(64, 512), st.randoms())
def test_the_order_of_arrival_does_not_matter(
    lengths: list[int], world_size: int, budget: int, random: object
) -> None:
    batch = samples(lengths)
    shuffled = list(batch)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert share_out(batch, world_size, budget) == share_out(shuffled, world_size, budget)


@given(lengths, st.integers(1, 6), st.integers(64, 512))
def test_every_rank_can_run_the_number_of_micro_batches(
    lengths: list[int], world_size: int, budget: int
) -> None:
    shares = share_out(samples(lengths), world_size, budget)
    needed = [len(split(share, budget)) for share in shares.samples]
    assert shares.num_micro_batches == max(1, *needed)
    for share in shares.samples:
        assert len(pad_with_empty(split(share, budget), shares.num_micro_batches)) == shares.num_micro_batches


@given(lengths, st.integers(64, 512))
def test_micro_batches_hold_every_sample_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = split(samples(lengths), budget)
    assert sorted(s.sample_id for b in batches for s in b) == sorted(s.sample_id for s in samples(lengths))
    for batch in batches:
        assert batch
        padded = len(batch) * max(num_tokens(s) for s in batch)
        assert padded <= budget or len(batch) == 1


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_within_four_thirds_of_the_best(lengths: list[int], world_size: int) -> None:
    shares = share_out(samples(lengths), world_size, 512)
    fullest = max(sum(num_tokens(s) for s in share) for share in shares.samples)
    best = min(
        max(
            sum(length for length, at in zip(lengths, places, strict=True) if at == rank)
            for rank in range(world_size)
        )
        for places in itertools.product(range(world_size), repeat=len(lengths))
    )
    assert 3 * fullest <= 4 * best


@pytest.mark.parametrize(
    ("lengths", "budget", "rows"),
    [
        ([5, 4, 3], 10, [2, 1]),
        ([5, 5, 5], 15, [3]),
        ([100, 2, 2], 10, [1, 2]),
        ([], 10, []),
    ],
)
def test_split_examples(lengths: list[int], budget: int, rows: list[int]) -> None:
    assert [len(batch) for batch in split(samples(lengths), budget)] == rows


def test_nothing_to_train_is_still_one_micro_batch() -> None:
    shares = share_out([], 3, 512)
    assert shares.samples == ((), (), ())
    assert shares.num_micro_batches == 1
