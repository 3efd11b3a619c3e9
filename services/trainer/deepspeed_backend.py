"""DeepSpeed ZeRO-3 as a `TrainBackend`: bf16 parameters, fp32 masters, AdamW, one process per device.

    build   the model is made under zero.Init, so no rank ever holds it whole; each rank copies the flat
            range that ZeRO gave it out of GPS's pool, and DeepSpeed makes the fp32 masters of that
    train   per micro-batch one forward and one backward pass, which reduces into fp32; at the end of a
            step, one division by its response tokens, which are not known before, and the step itself.
            DeepSpeed averages gradients over ranks, the batch loss is a sum: each loss is multiplied by
            the world size
    write   ZeRO's partition of a parameter is row-major and contiguous: rank r of W has
            [r*p, min((r+1)*p, numel)) with p = ceil(numel/W), and the pool takes it as it is

DeepSpeed reads `ds_tensor` wrong in places while parameters are offloaded: everything that touches them
reloads first.
"""

import ctypes
import gc
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from services.trainer.kernels import build_kernels
from services.trainer.objectives import TokenLoss, grpo_loss, token_logprobs
from services.trainer.packing import num_tokens, pad_with_empty, split
from services.trainer.ports import StepStats
from shared.contracts.gps import TensorBox
from shared.contracts.rank import TrainSample
from shared.errors import EngineError, LayoutError, NotFound
from shared.layout.tensor_layout import FlatRange
from shared.weights.checksum import checksum_region
from shared.weights.host_pool import MappedPool

log = logging.getLogger("pivotrl.rank")
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.0
MAX_GRAD_NORM = 1.0
BUCKET_ELEMENTS = 50_000_000
"""Gradients reduced at a time, at most; the bucket is fp32."""


@dataclass(frozen=True, slots=True)
class BackendConfig:
    model: Path
    checkpoints: Path
    kind: Literal["cpu", "cuda"]
    rank: int
    world_size: int
    seed: int
    learning_rate: float
    clip_low: float
    clip_high: float
    temperature: float
    micro_batch_tokens: int


class DeepSpeedBackend:
    """`store` is a torch.distributed store that all ranks of this life share.

    The constructor joins the process group and builds DeepSpeed's optimizer kernel: up to a minute the first
    time.
    """

    def __init__(self, config: BackendConfig, store: Any) -> None:
        # LOCAL_SIZE = 0 keeps DeepSpeed off its own all-reduce in shared memory: ranks that spin there cannot
        # be told that a peer died, and its buffers are named alike in every run of a machine
        os.environ.update(
            RANK=str(config.rank), WORLD_SIZE=str(config.world_size), LOCAL_RANK="0", LOCAL_SIZE="0"
        )
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        if config.kind == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        build_kernels(config.kind)
        self._config = config
        self._deepspeed = deepspeed
        self._device = torch.device("cuda", 0) if config.kind == "cuda" else torch.device("cpu")
        self._engine: Any = None
        self._is_offloaded = False
        self._gradient_bytes = 0
        self._has_gradients = False
        self._kept_gradients: torch.Tensor | None = None
        self._step = 0
        self._tag: str | None = None
        self._boxes: tuple[TensorBox, ...] = ()
        self._constants: dict[str, torch.Tensor] = {}
        if config.kind == "cuda":
            torch.cuda.set_device(self._device)
        torch.distributed.init_process_group(
            "nccl" if config.kind == "cuda" else "gloo",
            store=store,
            rank=config.rank,
            world_size=config.world_size,
        )
        deepspeed.init_distributed(dist_init_required=False)

    @property
    def is_built(self) -> bool:
        return self._engine is not None

    @property
    def is_offloaded(self) -> bool:
        return self._is_offloaded

    @property
    def step(self) -> int:
        return self._step

    @property
    def tag(self) -> str | None:
        return self._tag

    def resident_bytes(self) -> int:
        """Device memory that this process keeps from others; on CPU its resident set."""
        if self._config.kind == "cuda":
            return int(torch.cuda.memory_reserved())
        return int(psutil.Process().memory_info().rss)

    # life of the model

    def build(self, pool: MappedPool) -> None:
        if self._engine is None:
            module = self._new_module()
            self._check_layout(module, pool)
            self._fill(module, pool)
            self._engine, *_ = self._deepspeed.initialize(
                model=module, model_parameters=list(module.parameters()), config=self._ds_config(module)
            )
            _restore_rotary_precision(module)
        else:
            self._reset(pool)
        self._boxes = tuple(self._find_boxes(pool))
        self._step, self._tag = 0, ""
        torch.manual_seed(self._config.seed)

    def _new_module(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        hf_config = AutoConfig.from_pretrained(str(self._config.model), local_files_only=True)
        with (
            no_init_weights(),
            self._deepspeed.zero.Init(config_dict_or_path=self._ds_config(None), dtype=torch.bfloat16),
        ):
            module = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        module.tie_weights()
        module.train()
        if self._config.kind == "cuda":
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _ds_config(self, module: Any) -> dict[str, Any]:
        bucket = BUCKET_ELEMENTS
        if module is not None:
            bucket = min(bucket, max(1, sum(p.ds_numel for p in module.parameters())))
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": MAX_GRAD_NORM,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": self._config.learning_rate,
                    "betas": list(BETAS),
                    "eps": EPSILON,
                    "weight_decay": WEIGHT_DECAY,
                },
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": self._config.kind == "cuda",
                "contiguous_gradients": True,
                "reduce_bucket_size": bucket,
                "stage3_prefetch_bucket_size": bucket,
            },
            "checkpoint": {"tag_validation": "Ignore"},
            "steps_per_print": 1 << 40,
            "wall_clock_breakdown": False,
        }

    def _check_layout(self, module: Any, pool: MappedPool) -> None:
        """Raises LayoutError unless every parameter is in the pool (of tied ones, one name is enough)."""
        names: dict[int, list[str]] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        known = set(pool.names)
        if missing := [group[0] for group in names.values() if not known & set(group)]:
            raise LayoutError(
                f"{len(missing)} parameters of the model are no tensors of its checkpoint: {missing[0]}, …",
                parameters=missing[:8],
            )
        for name in known & parameters.keys():
            tensor, parameter = pool.tensor(name), parameters[name]
            if tensor.shape != tuple(parameter.ds_shape) or tensor.dtype != "bfloat16":
                raise LayoutError(
                    f"{name} is {tensor.dtype} {tensor.shape} in the pool, "
                    f"bfloat16 {tuple(parameter.ds_shape)} in the model",
                    parameters=[name],
                )

    # this rank's shard

    def _range(self, parameter: Any) -> tuple[int, int]:
        """Start and count of this rank's elements; the count is 0 where a small parameter ends before."""
        size = parameter.ds_tensor.ds_numel
        start = min(self._config.rank * size, parameter.ds_numel)
        return start, min(size, parameter.ds_numel - start)

    def _shards(self, module: Any, pool: MappedPool) -> Iterator[tuple[str, Any, int, int]]:
        """(checkpoint name, parameter, start, count) in the pool's order, empty ranges left out."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in pool.names:
            if (parameter := parameters.get(name)) is not None:
                start, count = self._range(parameter)
                if count:
                    yield name, parameter, start, count

    def _fill(self, module: Any, pool: MappedPool) -> None:
        for name, parameter, start, count in self._shards(module, pool):
            pool.read_flat(name, start, parameter.ds_tensor.data[:count])
            parameter.ds_tensor.data[count:].zero_()
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if self._config.rank == 0:  # tensors that nobody trains are written back as they came
            numel = {n: math.prod(pool.tensor(n).shape) for n in pool.names if n not in names}
            self._constants = {n: pool.flat(n, 0, count).clone() for n, count in numel.items()}

    def _find_boxes(self, pool: MappedPool) -> Iterator[TensorBox]:
        for name, _, start, count in self._shards(self._engine.module, pool):
            yield TensorBox(tensor=name, flat_start=start, flat_count=count)
        for name, tensor in self._constants.items():
            if tensor.numel():
                yield TensorBox(tensor=name, flat_start=0, flat_count=tensor.numel())

    def _reset(self, pool: MappedPool) -> None:
        """Back to the pool's parameters, masters made of them, no optimizer history."""
        self.reload()
        self._drop_gradients()
        optimizer = self._engine.optimizer
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
        self._fill(self._engine.module, pool)
        for flat, master in zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            master.data.copy_(flat)
        optimizer.optimizer.state.clear()
        if persistent:
            persistent[0].all_gather(persistent)

    def shard_boxes(self) -> tuple[TensorBox, ...]:
        return self._boxes

    def copy_shard(self, pool: MappedPool) -> tuple[str, ...]:
        self.reload()
        parameters = dict(self._engine.module.named_parameters(remove_duplicate=False))
        checksums = []
        for box in self._boxes:
            start, count = box.flat_start or 0, box.flat_count
            if box.tensor in parameters:
                source = parameters[box.tensor].ds_tensor.data[:count]
            else:
                source = self._constants[box.tensor].reshape(-1)
            pool.write_flat(box.tensor, start, source)
            shape, width, part = pool.tensor(box.tensor).shape, source.element_size(), FlatRange(start, count)
            storage = pool.storage(box.tensor)
            checksums.append(checksum_region(pool.raw(box.tensor), shape, width, part, storage))
        return tuple(checksums)

    # training

    def train(
        self,
        step: int,
        samples: Sequence[TrainSample],
        total_response_tokens: int | None,
        num_micro_batches: int,
    ) -> StepStats:
        self.reload()
        self._tag = None
        engine = self._engine
        batches = pad_with_empty(split(samples, self._config.micro_batch_tokens), num_micro_batches)
        seen: list[TokenLoss] = []
        for i, batch in enumerate(batches):
            is_last = total_response_tokens is not None and i == len(batches) - 1
            engine.set_gradient_accumulation_boundary(is_last)
            loss = self._forward(batch)
            engine.backward(loss.loss_sum * self._config.world_size, scale_wrt_gas=False)
            seen.append(loss)
        grad_norm = 0.0
        self._has_gradients = True
        if total_response_tokens is not None:
            grad_norm = self._take_step(step, total_response_tokens)
        return StepStats(
            loss_sum=sum(float(loss.loss_sum.detach()) for loss in seen),
            grad_norm=grad_norm,
            tokens=sum(num_tokens(sample) for sample in samples),
            response_tokens=sum(loss.num_tokens for loss in seen),
            logprob_gap_sum=sum(loss.logprob_gap_sum for loss in seen),
            logprob_gap_max=max(loss.logprob_gap_max for loss in seen),
            importance_ratio_max=max(loss.ratio_max for loss in seen),
            clipped_tokens=sum(loss.num_clipped for loss in seen),
        )

    def _take_step(self, step: int, total_response_tokens: int) -> float:
        """The optimizer step on the gradients that have come together; the norm of their mean."""
        self._engine.optimizer.grad_partitions_flat_buffer.div_(max(1, total_response_tokens))
        self._engine.step()
        self._has_gradients = False
        grad_norm = float(self._engine.get_global_grad_norm())
        if grad_norm < 0:  # DeepSpeed's sign for infinite or NaN
            raise EngineError("the gradient is infinite or not a number", phase="train", step=step)
        self._step = step + 1
        return grad_norm

    def _drop_gradients(self) -> None:
        """The next pass overwrites what passes of a step that was not ended have left."""
        self._engine.optimizer.zero_grad()
        self._has_gradients = False

    def _forward(self, batch: Sequence[TrainSample]) -> TokenLoss:
        """One micro-batch, right-padded: causal attention keeps real tokens from seeing the padding."""
        if not batch:
            ids = torch.zeros((1, 1), dtype=torch.long, device=self._device)
            logits = self._engine(input_ids=ids, use_cache=False).logits
            return TokenLoss(logits.float().sum() * 0.0, 0, 0.0, 0.0, 0.0, 0)
        length = max(num_tokens(sample) for sample in batch)
        first = min(len(sample.prompt_token_ids) for sample in batch) - 1
        ids = torch.zeros((len(batch), length), dtype=torch.long)
        is_response = torch.zeros((len(batch), length), dtype=torch.bool)
        for row, sample in enumerate(batch):
            tokens = (*sample.prompt_token_ids, *sample.response_token_ids)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            is_response[row, len(sample.prompt_token_ids) : len(tokens)] = True
        behaviour = torch.tensor([p for sample in batch for p in sample.logprobs])
        lengths = torch.tensor([len(sample.response_token_ids) for sample in batch])
        advantages = torch.tensor([sample.advantage for sample in batch]).repeat_interleave(lengths)
        targets = ids[is_response].to(self._device)
        # the logits at position t predict token t + 1
        keep = torch.arange(first, length - 1, device=self._device)
        output = self._engine(input_ids=ids.to(self._device), use_cache=False, logits_to_keep=keep)
        chosen = output.logits[is_response[:, first + 1 :].to(self._device)]
        return grpo_loss(
            token_logprobs(chosen, targets, self._config.temperature),
            behaviour.to(self._device, torch.float32),
            advantages.to(self._device, torch.float32),
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
        )

    # device and host

    def _states(self) -> Iterator[torch.Tensor]:
        """What `offload` moves to the host, as far as it exists."""
        optimizer = self._engine.optimizer
        yield from optimizer.fp32_partitioned_groups_flat
        for state in optimizer.optimizer.state.values():
            yield from (state[key] for key in ("exp_avg", "exp_avg_sq") if key in state)
        yield optimizer.lp_param_buffer

    def offload(self) -> int:
        """On CUDA the device bytes that became free. On CPU device and host are one memory: the reduction
        bucket and, between steps, gradients are freed, the rest stays where it is; the answer is the bytes of
        the gradients and of the states that were found on the host. What the process still takes,
        `resident_bytes` says."""
        if self._is_offloaded or self._engine is None:
            return 0
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        before = self._allocated()
        self._engine.offload_states(
            include=[
                State.optim_states,
                State.hp_params,
                State.lp_params,
                State.contiguous_grad_buffer,
            ],
            pin_memory=self._config.kind == "cuda",
            non_blocking=False,
        )
        self._offload_gradients()
        self._is_offloaded = True
        self._trim()
        if self._config.kind == "cuda":
            return before - self._allocated()
        return self._gradient_bytes + sum(int(s.nbytes) for s in self._states() if s.device.type == "cpu")

    def reload(self) -> int:
        if not self._is_offloaded:
            return 0
        before = self._allocated()
        self._engine.reload_states(non_blocking=False)
        self._reload_gradients()
        self._is_offloaded = False
        if self._config.kind == "cuda":
            torch.cuda.synchronize()
            return self._allocated() - before
        return self._gradient_bytes + sum(int(state.nbytes) for state in self._states())

    def _offload_gradients(self) -> None:
        """Their memory goes, their views stay. Between steps they are dead; within one a copy is kept."""
        gradients = self._engine.optimizer.grad_partitions_flat_buffer
        self._gradient_bytes = int(gradients.untyped_storage().nbytes())
        if self._has_gradients:
            is_pinned = self._config.kind == "cuda"
            self._kept_gradients = torch.empty_like(gradients, device="cpu", pin_memory=is_pinned)
            self._kept_gradients.copy_(gradients)
        gradients.untyped_storage().resize_(0)

    def _reload_gradients(self) -> None:
        gradients = self._engine.optimizer.grad_partitions_flat_buffer
        gradients.untyped_storage().resize_(self._gradient_bytes)
        if self._kept_gradients is not None:
            gradients.copy_(self._kept_gradients)
            self._kept_gradients = None

    def _allocated(self) -> int:
        return int(torch.cuda.memory_allocated()) if self._config.kind == "cuda" else 0

    def _trim(self) -> None:
        gc.collect()
        if self._config.kind == "cuda":
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)

    # checkpoints

    def save(self, tag: str) -> None:
        self.reload()
        random = {"cpu": torch.get_rng_state()}
        if self._config.kind == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        self._config.checkpoints.mkdir(parents=True, exist_ok=True)
        self._engine.save_checkpoint(
            str(self._config.checkpoints),
            tag=tag,
            client_state={"pivotrl": {"step": self._step, "random": random}},
            save_latest=False,
        )
        for path in (self._config.checkpoints / tag).glob(f"*zero_pp_rank_{self._config.rank}_*"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        self._tag = tag

    def load(self, tag: str) -> None:
        if not (self._config.checkpoints / tag).is_dir():
            raise NotFound(f"no checkpoint {tag} in {self._config.checkpoints}", tag=tag)
        self.reload()
        self._drop_gradients()
        self._tag = None
        _, state = self._engine.load_checkpoint(str(self._config.checkpoints), tag=tag)
        self._step, self._tag = int(state["pivotrl"]["step"]), tag
        torch.set_rng_state(state["pivotrl"]["random"]["cpu"])
        if self._config.kind == "cuda":
            torch.cuda.set_rng_state(state["pivotrl"]["random"]["cuda"])
        del state
        self._trim()  # the files were read whole

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _restore_rotary_precision(module: Any) -> None:
    """Rotary frequencies back to fp32: zero.Init and DeepSpeed's bf16 mode cast every buffer to bf16. That
    turns late positions by a wrong angle, and the engines that generate keep them in fp32."""
    for part in module.modules():
        if "inv_freq" in part._buffers:
            device = part.inv_freq.device
            for name, buffer in type(part)(part.config)._buffers.items():
                part._buffers[name] = buffer.to(device)
    if cast := sorted({n for n, b in module.named_buffers() if b.dtype == torch.bfloat16}):
        log.warning("buffers in bfloat16, not as the model made them: %s", ", ".join(cast))
