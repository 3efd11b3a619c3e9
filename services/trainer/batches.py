"""Complete groups become batches, in issue order. Pure.

Batch k holds the prompts [k*P, (k+1)*P), all of whose samples were issued at version >= k - staleness. Taking
batches in this order is what keeps a sample's staleness within the bound (see `shared.scheduling.staleness`):
letting fast groups overtake would leave a straggler behind for any number of versions.

With streaming a batch is taken in parts, groups that are complete first; the next one is not begun before it
is trained.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.contracts.reward import ScoredSample
from shared.ids import prompt_index_of
from shared.scheduling.streaming import Streaming


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step, whole groups, by sample id: all of them, or a part."""

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
    streaming: Streaming | None = None
    """None: a batch is taken whole."""
    is_dedicated: bool = False
    """Training has devices of its own."""
    next_step: int = 0
    num_duplicates: int = 0
    _samples: dict[str, tuple[int, ScoredSample]] = field(default_factory=dict)
    _num_of: Counter[int] = field(default_factory=Counter)
    """Samples that are here, by prompt."""
    _taken: set[int] = field(default_factory=set)
    """Prompts of the next batch."""

    @property
    def needed(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def has_begun(self) -> bool:
        """A part of the next batch was taken."""
        return bool(self._taken)

    @property
    def is_taken(self) -> bool:
        """All of the next batch was taken."""
        return len(self._taken) == self.prompts_per_step

    def _next_prompts(self) -> range:
        return range(self.next_step * self.prompts_per_step, (self.next_step + 1) * self.prompts_per_step)

    def add(self, seq: int, scored: ScoredSample) -> bool:
        """False: it is here already, or its step is trained; the caller may discard it."""
        sample, prompt = scored.trajectory.sample_id, prompt_index_of(scored.trajectory.sample_id)
        if sample in self._samples and self._samples[sample][0] == seq:
            return True  # the same entry of the stream, delivered again
        if sample in self._samples or prompt < self._next_prompts().start:
            self.num_duplicates += 1
            return False
        self._samples[sample] = (seq, scored)
        self._num_of[prompt] += 1
        return True

    def collected(self) -> int:
        """Samples of the next batch that are here, those taken included."""
        return sum(self._num_of[prompt] for prompt in self._next_prompts())

    def _complete(self) -> list[int]:
        """Prompts that can be taken."""
        whole = (p for p in self._next_prompts() if self._num_of[p] == self.group_size)
        return [prompt for prompt in whole if prompt not in self._taken]

    def is_ready(self) -> bool:
        """Something is to be taken now."""
        num_complete = len(self._complete())
        if self.streaming is None:
            return num_complete == self.prompts_per_step
        return self.streaming.is_ready(
            num_complete, len(self._taken), self.prompts_per_step, is_dedicated=self.is_dedicated
        )

    def take(self) -> Batch:
        """What is complete of the next batch; it stays here until `trained`."""
        assert self.is_ready()
        prompts = set(self._complete())
        self._taken |= prompts
        chosen = sorted(sample for sample in self._samples if prompt_index_of(sample) in prompts)
        entries = [self._samples[sample] for sample in chosen]
        return Batch(self.next_step, tuple(s for _, s in entries), tuple(seq for seq, _ in entries))

    def resume(self, step: int) -> list[int]:
        """Continue at `step`, nothing of it taken; the places in the stream of samples here that earlier
        steps have trained."""
        self.next_step = step
        self._taken.clear()
        return self._drop_trained()

    def trained(self) -> None:
        """The next batch, all of which was taken, is trained."""
        assert self.is_taken
        self.resume(self.next_step + 1)

    def _drop_trained(self) -> list[int]:
        first = self._next_prompts().start
        for prompt in [prompt for prompt in self._num_of if prompt < first]:
            del self._num_of[prompt]
        done = [sample for sample in self._samples if prompt_index_of(sample) < first]
        return [self._samples.pop(sample)[0] for sample in done]
