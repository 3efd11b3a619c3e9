"""The loss against numbers worked out by hand, and its gradient against autograd on the definition."""

import math

import pytest

torch = pytest.importorskip("torch")

from services.trainer.objectives import DUAL_CLIP, grpo_loss, token_logprobs  # noqa: E402


def loss_of(ratio: float, advantage: float) -> tuple[float, float, int]:
    """Loss, d loss / d logprob, clipped tokens, of one token."""
    new = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    result = grpo_loss(
        new,
        torch.tensor([-2.0]),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
    )
    result.loss_sum.backward()
    assert new.grad is not None
    return float(result.loss_sum.detach()), float(new.grad[0]), result.num_clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (1.0, -1.0, 1.0, 1.0, 0),
        (1.2, 1.0, -1.2, -1.2, 0),  # inside 1 + clip_high
        (1.5, 1.0, -1.28, 0.0, 1),  # DAPO's higher upper bound
        (1.5, -1.0, 1.5, 1.5, 0),  # a bad token that became likelier is pushed down in full
        (0.5, 1.0, -0.5, -0.5, 0),
        (0.5, -1.0, 0.8, 0.0, 1),  # below 1 - clip_low
        (5.0, -1.0, 3.0, 0.0, 1),  # dual clip
        (5.0, -0.5, 1.5, 0.0, 1),
        (1.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_a_token_costs_what_the_formula_says(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    assert loss_of(ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), clipped)


def test_statistics_are_of_all_tokens() -> None:
    result = grpo_loss(
        torch.tensor([-1.0, -2.0, -3.0]),
        torch.tensor([-1.5, -2.0, -2.0]),
        torch.tensor([1.0, 1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert result.num_tokens == 3
    assert result.logprob_gap_sum == pytest.approx(1.5)
    assert result.logprob_gap_max == pytest.approx(1.0)
    assert result.ratio_max == pytest.approx(math.exp(0.5))
    assert result.num_clipped == 2  # exp(0.5) with A > 0; exp(-1) with A < 0


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    result = grpo_loss(
        torch.tensor([-1.0, -1.0]),
        torch.tensor([-500.0, -500.0]),
        torch.tensor([1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert float(result.loss_sum) == pytest.approx(-1.28 + DUAL_CLIP)


def test_nothing_costs_nothing() -> None:
    empty = torch.zeros(0)
    result = grpo_loss(empty, empty, empty, clip_low=0.2, clip_high=0.28)
    assert (float(result.loss_sum), result.num_tokens, result.ratio_max) == (0.0, 0, 0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_of_the_scaled_distribution(temperature: float) -> None:
    logits = torch.randn(2100, 11, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 11, (2100,), generator=torch.Generator().manual_seed(2))
    expected = torch.log_softmax(logits / temperature, dim=1)[torch.arange(2100), tokens]
    torch.testing.assert_close(token_logprobs(logits, tokens, temperature), expected)


def test_logprobs_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert float(token_logprobs(logits, torch.tensor([1]), 1.0)[0]) == pytest.approx(math.log(3 / 4))
    assert float(token_logprobs(logits, torch.tensor([1]), 0.5)[0]) == pytest.approx(math.log(9 / 10))


def test_the_gradient_through_logits_is_the_policy_gradient() -> None:
    """Where ratios are 1, d loss / d logits = -A (onehot - softmax(logits / t)) / t."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits.requires_grad_(True)
    tokens = torch.tensor([0, 3, 6, 2, 2])
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.0], dtype=torch.float64)
    new = token_logprobs(logits, tokens, 0.7)
    grpo_loss(new, new.detach(), advantages, clip_low=0.2, clip_high=0.28).loss_sum.backward()
    onehot = torch.nn.functional.one_hot(tokens, 7)
    expected = -advantages[:, None] * (onehot - torch.softmax(logits.detach() / 0.7, dim=1)) / 0.7
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected, rtol=1e-4, atol=1e-5)
