import random as random_module
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.advantages import group_advantages, weigh
from services.trainer.batches import Batch, BatchAssembler
from shared.contracts.reward import ScoredSample
from shared.ids import sample_id
from shared.scheduling.streaming import BURSTS, EAGER, LATE, Streaming
from tests.support.samples import scored_sample

PROMPTS, GROUP = 2, 3


def scored(prompt: int, sample: int, reward: float | None = 1.0, *, tokens: int = 2) -> ScoredSample:
    return scored_sample(prompt, sample, reward, group_size=GROUP, num_tokens=tokens)


def arrivals(seed: int, steps: int, repeats: int) -> Iterator[tuple[int, ScoredSample]]:
    """All samples of `steps` batches in any order, some of them again under another place in the stream."""
    random = random_module.Random(seed)
    samples = [scored(p, k) for p in range(steps * PROMPTS) for k in range(GROUP)]
    samples += [random.choice(samples) for _ in range(repeats)]
    random.shuffle(samples)
    yield from enumerate(samples, start=1)


@given(st.integers(), st.integers(1, 4), st.integers(0, 10))
def test_batches_are_whole_in_order_and_hold_every_sample_once(seed: int, steps: int, repeats: int) -> None:
    assembler = BatchAssembler(PROMPTS, GROUP)
    taken: list[Batch] = []
    kept, refused = 0, 0
    for seq, sample in arrivals(seed, steps, repeats):
        if assembler.add(seq, sample):
            kept += 1
        else:
            refused += 1
        while assembler.is_ready():
            batch = assembler.take()
            assembler.trained()
            taken.append(batch)
    assert [batch.step for batch in taken] == list(range(steps))
    for batch in taken:
        expected = [sample_id(batch.step * PROMPTS + p, k) for p in range(PROMPTS) for k in range(GROUP)]
        assert [s.trajectory.sample_id for s in batch.samples] == expected
        assert sorted(batch.groups) == [batch.step * PROMPTS + p for p in range(PROMPTS)]
    assert (kept, refused) == (steps * PROMPTS * GROUP, repeats)
    assert assembler.num_duplicates == repeats
    assert len({seq for batch in taken for seq in batch.seqs}) == kept


def test_a_batch_stays_until_it_is_trained_and_may_be_taken_again_after_a_start_over() -> None:
    assembler = BatchAssembler(1, 2)
    assembler.add(1, scored(0, 0))
    assert not assembler.is_ready()
    assembler.add(2, scored(0, 1))
    taken = assembler.take()
    assert (assembler.is_ready(), assembler.is_taken, assembler.collected()) == (False, True, 2)
    assert assembler.resume(0) == []
    assert assembler.take() == taken


@given(
    st.integers(),
    st.integers(1, 4),
    st.sampled_from([EAGER, BURSTS, LATE, Streaming(1.0)]),
    st.booleans(),
    st.lists(st.booleans(), min_size=1),
)
def test_parts_make_the_same_batches(
    seed: int, steps: int, streaming: Streaming, is_dedicated: bool, trains: list[bool]
) -> None:
    """Whenever training gets round to it, each batch is taken whole, in whole groups, before the next."""
    assembler = BatchAssembler(4, GROUP, streaming, is_dedicated)
    samples = [scored(p, k) for p in range(steps * 4) for k in range(GROUP)]
    random_module.Random(seed).shuffle(samples)
    parts: list[Batch] = []
    for i, sample in enumerate(samples):
        assembler.add(i, sample)
        while (trains[i % len(trains)] or i == len(samples) - 1) and assembler.is_ready():
            had_begun = assembler.has_begun
            part = assembler.take()
            share = len(part.groups) / 4
            assert all(len(group) == GROUP for group in part.groups.values())
            assert assembler.is_taken or had_begun or is_dedicated or share >= streaming.start_share
            parts.append(part)
            if assembler.is_taken:
                assembler.trained()
    assert [part.step for part in parts] == sorted(part.step for part in parts)
    for step in range(steps):
        taken = [p for part in parts if part.step == step for p in part.groups]
        assert sorted(taken) == list(range(step * 4, step * 4 + 4))
    assert sorted(seq for part in parts for seq in part.seqs) == list(range(len(samples)))


def test_the_same_entry_delivered_again_is_no_duplicate() -> None:
    assembler = BatchAssembler(1, 2)
    assert assembler.add(5, scored(0, 0))
    assert assembler.add(5, scored(0, 0))
    assert not assembler.add(6, scored(0, 0))
    assert (assembler.num_duplicates, assembler.collected()) == (1, 1)


def test_resuming_drops_what_earlier_steps_trained() -> None:
    assembler = BatchAssembler(1, 2)
    for seq, (prompt, sample) in enumerate([(0, 0), (1, 0), (0, 1), (2, 1)]):
        assembler.add(seq, scored(prompt, sample))
    assert sorted(assembler.resume(1)) == [0, 2]
    assert (assembler.next_step, assembler.collected()) == (1, 1)
    assert not assembler.add(9, scored(0, 0))


rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


@given(rewards)
def test_advantages_sum_to_nothing_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(advantages[a] <= advantages[b] + 1e-9 for a, b in pairwise(order))


def test_advantages_by_hand() -> None:
    assert group_advantages([1.0, 0.0]) == [pytest.approx(1, abs=1e-5), pytest.approx(-1, abs=1e-5)]
    assert group_advantages([0.5, 0.5, 0.5]) == [0, 0, 0]


outcomes = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0, 2)), st.integers(0, 2)), min_size=GROUP, max_size=GROUP
)


@given(st.lists(outcomes, min_size=1, max_size=4))
def test_every_sample_is_weighted_or_masked_once(groups: list[list[tuple[float | None, int]]]) -> None:
    samples = tuple(
        scored(p, k, reward, tokens=tokens)
        for p, group in enumerate(groups)
        for k, (reward, tokens) in enumerate(group)
    )
    weighted, masked = weigh(Batch(0, samples, tuple(range(len(samples)))))
    seen = [w.sample.trajectory.sample_id for w in weighted] + [m.sample.trajectory.sample_id for m in masked]
    assert sorted(seen) == sorted(s.trajectory.sample_id for s in samples)
    for entry in weighted:
        assert entry.sample.reward is not None
        assert entry.sample.trajectory.response_token_ids
    per_group = [w.sample.trajectory.prompt_index for w in weighted]
    assert all(per_group.count(p) >= 2 for p in set(per_group))
    assert all(m.reason for m in masked)
