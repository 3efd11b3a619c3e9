"""Losses over response tokens, in plain torch. Shapes: T tokens of one micro-batch, flat; V the vocabulary.

An objective is a function of (new log-probabilities, behaviour log-probabilities, advantages), each (T,), to
a sum of losses over the tokens and what it saw. The caller divides by the response tokens of the whole batch
(all ranks and micro-batches), which is DAPO's token-level loss: a long response counts by its tokens.

Both log-probabilities are of the *sampled* distribution, softmax(logits / temperature): vLLM reports
processed log-probabilities, so the trainer scales its logits by the same temperature before it compares.

Sources: GRPO (arXiv 2402.03300), clip-higher and token-level loss (DAPO, arXiv 2503.14476), dual clip
(arXiv 1912.09729).
"""

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""exp of more than this is not told apart from a broken sample; the gradient of such a token is zero."""
DUAL_CLIP = 3.0
"""c: where the advantage is negative, a token's loss is at most c * |A|, however large its ratio grew."""
CHUNK_TOKENS = 1024
"""Rows of logits turned to fp32 at a time."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss_sum` carries the gradient; the rest are plain numbers over the same tokens."""

    loss_sum: torch.Tensor
    num_tokens: int
    logprob_gap_sum: float
    logprob_gap_max: float
    ratio_max: float
    num_clipped: int


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature)[token], fp32, shape (T,). `logits` (T, V) in any float type."""
    parts = []
    for first in range(0, logits.shape[0], CHUNK_TOKENS):
        scaled = logits[first : first + CHUNK_TOKENS].float() / temperature
        chosen = scaled.gather(1, token_ids[first : first + CHUNK_TOKENS, None]).squeeze(1)
        parts.append(chosen - torch.logsumexp(scaled, dim=1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


def grpo_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The sum over tokens of -min(r*A, clip(r, 1 - clip_low, 1 + clip_high)*A), with r = exp(new -
    behaviour).

    Where A < 0 it is bounded by c*|A| (`DUAL_CLIP`): the guard against ratios that staleness or numerics blew
    up. A token counts as clipped where it has no gradient.

    >>> # r = 1.5, A = 1, clip_high = 0.28: -1.28, clipped.  r = 5, A = -1: 3 (not 5), clipped.
    """
    log_ratio = (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    free = ratio * advantages
    surrogate = torch.minimum(free, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    bounded = torch.where(advantages < 0, torch.maximum(surrogate, DUAL_CLIP * advantages), surrogate)
    loss_sum = -bounded.sum()
    with torch.no_grad():
        gap = (logprobs - behaviour).abs()
        above = (advantages > 0) & (ratio > 1 + clip_high)
        below = (advantages < 0) & ((ratio < 1 - clip_low) | (ratio > DUAL_CLIP))
        num = int(logprobs.numel())
        return TokenLoss(
            loss_sum=loss_sum,
            num_tokens=num,
            logprob_gap_sum=float(gap.sum()),
            logprob_gap_max=float(gap.max()) if num else 0.0,
            ratio_max=float(ratio.max()) if num else 0.0,
            num_clipped=int((above | below).sum()),
        )
