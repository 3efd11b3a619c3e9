"""A step while it is trained, in one part or several, and the account of it at the end. Pure."""

from dataclasses import dataclass, field

from services.trainer.advantages import Masked, Weighted, weigh
from services.trainer.batches import Batch
from shared.contracts.rank import RankStepped, TrainSample
from shared.contracts.reward import ScoredSample
from shared.contracts.trainer import StepCompleted
from shared.scheduling.staleness import sample_staleness


@dataclass(slots=True)
class Step:
    """`number` is the policy version it trains; the step makes the next one."""

    number: int
    samples: list[ScoredSample] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    weighted: list[Weighted] = field(default_factory=list)
    masked: list[Masked] = field(default_factory=list)
    stepped: list[RankStepped] = field(default_factory=list)
    num_parts: int = 0
    train_s: float = 0.0
    """In the ranks: waiting for the rest of the batch is not counted."""

    def take_up(self, part: Batch) -> list[Weighted]:
        """A part of the batch; what is to be trained of it."""
        assert part.step == self.number
        weighted, masked = weigh(part)
        self.samples += part.samples
        self.seqs += part.seqs
        self.weighted += weighted
        self.masked += masked
        self.num_parts += 1
        return weighted

    @property
    def response_tokens(self) -> int:
        """Of the samples that are trained: what the loss divides by."""
        return sum(len(w.sample.trajectory.response_token_ids) for w in self.weighted)

    def journal_entries(self) -> list[dict[str, object]]:
        """Every sample of the batch, once."""
        trained: list[dict[str, object]] = [
            {"event": "trained", "step": self.number + 1, "sample": w.sample.trajectory.sample_id}
            for w in self.weighted
        ]
        return trained + [
            {
                "event": "masked",
                "step": self.number + 1,
                "sample": m.sample.trajectory.sample_id,
                "reason": m.reason,
            }
            for m in self.masked
        ]

    def row(self, write_s: float) -> StepCompleted:
        """The step in the run's table."""
        samples, stepped = self.samples, self.stepped
        staleness = [
            sample_staleness(self.number, s.trajectory.oldest_version)
            for s in samples
            if s.trajectory.versions
        ]
        response_tokens = max(1, self.response_tokens)
        return StepCompleted(
            step=self.number + 1,
            policy_version=self.number + 1,
            num_samples=len(samples),
            num_trained=len(self.weighted),
            num_unscored=sum(s.reward is None for s in samples),
            reward_mean=_mean([s.reward for s in samples if s.reward is not None]),
            verifiable_reward_mean=_mean(
                [s.verifiable_reward for s in samples if s.verifiable_reward is not None]
            ),
            genrm_reward_mean=_mean([s.genrm_reward for s in samples if s.genrm_reward is not None]),
            staleness_max=max(staleness, default=0),
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            response_tokens_mean=sum(len(s.trajectory.response_token_ids) for s in samples) / len(samples),
            loss=sum(r.loss_sum for r in stepped) / response_tokens,
            grad_norm=max((r.grad_norm for r in stepped), default=0.0),
            logprob_gap_mean=sum(r.logprob_gap_sum for r in stepped) / response_tokens,
            logprob_gap_max=max((r.logprob_gap_max for r in stepped), default=0.0),
            importance_ratio_max=max((r.importance_ratio_max for r in stepped), default=0.0),
            clip_fraction=sum(r.clipped_tokens for r in stepped) / response_tokens,
            train_s=self.train_s,
            write_s=write_s,
            tokens=sum(r.tokens for r in stepped),
            num_parts=self.num_parts,
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def train_sample(weighted: Weighted) -> TrainSample:
    """As a rank trains it."""
    trajectory = weighted.sample.trajectory
    return TrainSample(
        sample_id=trajectory.sample_id,
        prompt_token_ids=trajectory.prompt_token_ids,
        response_token_ids=trajectory.response_token_ids,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        advantage=weighted.advantage,
    )
