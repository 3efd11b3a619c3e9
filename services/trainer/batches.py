"""Complete groups become batches, in issue order. Pure.

Batch k holds the prompts [k*P, (k+1)*P), all of whose samples were issued at version >= k - staleness. Taking
batches in this order is what keeps a sample's staleness within the bound (see `shared.scheduling.staleness`):
letting fast groups overtake would leave a straggler behind for any number of versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.contracts.reward import ScoredSample
from shared.ids import prompt_index_of


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples of one step, by sample id."""

    step: int
    samples: tuple[ScoredSample, ...]
    seqs: tuple[int, ...]
    """Their places in the stream, to be discarded once a checkpoint holds the step."""

    @property
    def groups(self) -> Mapping[int, tuple[ScoredSample, ...]]:
        by_prompt: dict[int, list[ScoredSample]] = {}
        for sample in self.samples:
            by_prompt.setdefault(sample.trajectory.prompt_index, []).append(sample)
        return {index: tuple(group) for index, group in by_prompt.items()}


@dataclass(slots=True)
class BatchAssembler:
    """Invariant: a sample is kept once, however often it comes; samples of trained steps are not kept at
    all."""

    prompts_per_step: int
    group_size: int
    next_step: int = 0
    _samples: dict[str, tuple[int, ScoredSample]] = field(default_factory=dict)
    num_duplicates: int = 0

    @property
    def needed(self) -> int:
        return self.prompts_per_step * self.group_size

    def step_of(self, sample: str) -> int:
        return prompt_index_of(sample) // self.prompts_per_step

    def add(self, seq: int, scored: ScoredSample) -> bool:
        """False: it is here already, or its step is trained; the caller may discard it."""
        sample = scored.trajectory.sample_id
        if sample in self._samples and self._samples[sample][0] == seq:
            return True  # the same entry of the stream, delivered again
        if sample in self._samples or self.step_of(sample) < self.next_step:
            self.num_duplicates += 1
            return False
        self._samples[sample] = (seq, scored)
        return True

    def collected(self) -> int:
        """Samples of the next batch that are here."""
        return sum(self.step_of(sample) == self.next_step for sample in self._samples)

    def is_ready(self) -> bool:
        return self.collected() == self.needed

    def take(self) -> Batch:
        """The next batch; it stays here until `trained`."""
        assert self.is_ready()
        chosen = sorted(sample for sample in self._samples if self.step_of(sample) == self.next_step)
        entries = [self._samples[sample] for sample in chosen]
        return Batch(self.next_step, tuple(s for _, s in entries), tuple(seq for seq, _ in entries))

    def resume(self, step: int) -> list[int]:
        """Continue at `step`; the places in the stream of samples here that earlier steps have trained."""
        self.next_step = step
        done = [sample for sample in self._samples if self.step_of(sample) < step]
        return [self._samples.pop(sample)[0] for sample in done]

    def trained(self, batch: Batch) -> None:
        assert batch.step == self.next_step
        for sample in batch.samples:
            del self._samples[sample.trajectory.sample_id]
        self.next_step += 1
