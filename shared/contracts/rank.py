"""trainer service ↔ its rank workers: one request per rank and command, all ranks in parallel."""

from shared.contracts.base import Message


class TrainSample(Message):
    """One scored response as a rank trains it. `advantage` is group relative; `logprobs` are the behaviour
    policy's, one per response token; `versions` their run-length policy versions. A masked sample
    (`advantage` None: unscored) is never sent."""

    sample_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    advantage: float


class StageSamples(Message):
    """trainer → rank: part `part` of `num_parts` of this rank's share of `step`. Staging again replaces."""

    step: int
    part: int
    num_parts: int
    samples: tuple[TrainSample, ...]

    def summary(self) -> str:
        return f"step {self.step}: stage {len(self.samples)} samples, part {self.part + 1}/{self.num_parts}"


class TrainStep(Message):
    """trainer → rank: forward and backward passes over the staged samples, then one optimizer step. The
    token-level loss (DAPO) divides by `total_response_tokens`, of the whole step and all ranks. None: more
    samples of the step follow, so gradients are kept and no step is taken yet."""

    step: int
    total_response_tokens: int | None
    num_micro_batches: int

    def summary(self) -> str:
        part = "a part of " if self.total_response_tokens is None else ""
        return f"train {part}step {self.step}"


class RankStepped(Message):
    """rank → trainer. Sums are over this rank's response tokens of this command, so that the trainer can
    weigh ranks and parts right. `grad_norm` is 0 where no step was taken."""

    rank: int
    step: int
    loss_sum: float
    grad_norm: float
    tokens: int
    response_tokens: int
    logprob_gap_sum: float
    logprob_gap_max: float
    importance_ratio_max: float
    clipped_tokens: int
    duration_s: float


class ReloadStates(Message):
    """trainer → rank: shift up: bring optimizer and master states back to the device."""


class OffloadStates(Message):
    """trainer → rank: shift down: move optimizer and master states off the device."""


class RankMoved(Message):
    """rank → trainer. `moved_bytes` are the states DeepSpeed moved; `freed_bytes` is what the process gave
    back of its device's memory, by measurement. On CPU both are one memory: much moves, little is freed."""

    rank: int
    moved_bytes: int
    resident_bytes: int
    duration_s: float
    freed_bytes: int = 0


class WritePolicy(Message):
    """trainer → rank: Write this rank's shard to GPS as `version`."""

    version: int


class RankWrote(Message):
    rank: int
    version: int
    nbytes: int
    committed: bool
    duration_s: float


class SaveCheckpoint(Message):
    """trainer → rank: save engine, optimizer and RNG under the run folder's `checkpoints/<tag>`."""

    tag: str


class CheckpointSaved(Message):
    rank: int
    tag: str
    duration_s: float


class LoadCheckpoint(Message):
    """trainer → rank: go to the state saved as `tag`; an empty tag means the freshly initialised model."""

    tag: str


class RankStatus(Message):
    """rank → trainer, heartbeat at 1 Hz on `rank.<n>.status`, and the answer to LoadCheckpoint."""

    rank: int
    world_size: int
    incarnation: str
    phase: str
    step: int
    resident_bytes: int
    pid: int
