"""Training as a model: which batch is next, whether it may begin, how long it takes.

Batch k is the k-th block of prompts in issue order, as in the trainer. By default a batch is trained when its
last sample is there. With `Streaming`, groups whose samples are all there are trained while the others
finish; the step still ends with the whole batch, so that the issue bound does not change.
"""

from collections.abc import Sequence

from shared.scheduling.streaming import Streaming
from shared.sim.scenarios import Scenario
from shared.sim.workload import Sample


class Training:
    """Batches on `num_devices` devices. Steps of seconds; the caller keeps the clock."""

    def __init__(
        self,
        scenario: Scenario,
        num_devices: int,
        batches: Sequence[Sequence[Sample]],
        *,
        streaming: Streaming | None = None,
        is_dedicated: bool = False,
    ) -> None:
        self._scenario, self._num_devices = scenario, num_devices
        self._streaming, self._is_dedicated = streaming, is_dedicated
        work = scenario.workload
        self._group, self._prompts = work.samples_per_prompt, work.prompts_per_step
        self.missing = [work.batch_samples for _ in batches]
        """Samples of each batch that are not scored yet."""
        self._tokens_of = [
            [
                sum(s.prompt + s.response for s in batch[first : first + self._group])
                for first in range(0, len(batch), self._group)
            ]
            for batch in batches
        ]
        self._missing_of = [[self._group] * self._prompts for _ in batches]
        self._complete: list[list[int]] = [[] for _ in batches]
        self.num_trained = 0
        """Whole steps."""
        self.step_ends_s: list[float] = []
        self._num_groups_done = 0
        self._num_groups_in_work = 0
        self._since_s: float | None = None
        self._active_s = 0.0

    def scored(self, prompt_index: int) -> None:
        """One more sample of a prompt has its reward."""
        batch, group = divmod(prompt_index, self._prompts)
        self.missing[batch] -= 1
        self._missing_of[batch][group] -= 1
        if self._missing_of[batch][group] == 0:
            self._complete[batch].append(group)

    @property
    def is_active(self) -> bool:
        """Training, or keeping devices for the rest of a batch that has been begun."""
        keeps = self._num_groups_done > 0 and not (self._streaming and self._streaming.lends)
        return self._since_s is not None or keeps

    @property
    def is_running(self) -> bool:
        return self._since_s is not None

    @property
    def is_batch_complete(self) -> bool:
        """All samples of the next batch are scored."""
        return self.missing[self.num_trained] == 0

    @property
    def is_ready(self) -> bool:
        """Whether devices would be put to use."""
        if self._since_s is not None:
            return False
        if self._streaming is None or self.is_batch_complete:
            return self.is_batch_complete
        num_complete = len(self._complete[self.num_trained])
        return self._streaming.is_ready(
            num_complete, self._num_groups_done, self._prompts, is_dedicated=self._is_dedicated
        )

    def begin(self, now_s: float) -> float:
        """Train on what is there, which must be ready; seconds it will take."""
        batch = self.num_trained
        groups = self._complete[batch]
        tokens = sum(self._tokens_of[batch][group] for group in groups)
        self._num_groups_in_work = len(groups)
        groups.clear()
        is_last = self._num_groups_done + self._num_groups_in_work == self._prompts
        self._since_s = now_s
        scenario = self._scenario
        seconds = scenario.policy.training_s(scenario.device, self._num_devices, tokens)
        return seconds + (scenario.training_fixed_s if is_last else 0.0)

    def end(self, now_s: float) -> bool:
        """What was begun is over; whether a step ended with it."""
        assert self._since_s is not None
        self._active_s += now_s - self._since_s
        self._since_s = None
        self._num_groups_done += self._num_groups_in_work
        if self._num_groups_done < self._prompts:
            return False
        self._num_groups_done = 0
        self.num_trained += 1
        self.step_ends_s.append(now_s)
        return True

    def active_s(self, now_s: float) -> float:
        """Seconds of training until now."""
        return self._active_s + (0.0 if self._since_s is None else now_s - self._since_s)
