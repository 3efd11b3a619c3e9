"""Random models of a few megabytes, in Hugging Face folders and in pool files.

`write_model` makes a folder (config, safetensors, byte-level tokenizer); `write_pool` lays its tensors out in
one file the way GPS lays a version out in shared memory.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.contracts.gps import PoolTensor, PoolView

ALIGNMENT = 256
"""Tensors start at multiples of this in a pool file, in bytes."""

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class TinySpec:
    """Shape of a random model. The default is about 7 million parameters."""

    family: Literal["llama", "qwen2", "qwen3_moe"] = "llama"
    vocab_size: int = 1000
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    seed: int = 0
    num_experts: int = 4
    """Of qwen3_moe; two of them serve a token."""

    @property
    def name(self) -> str:
        tied = "tied" if self.tie_word_embeddings else "untied"
        shape = f"{self.hidden_size}x{self.num_layers}-v{self.vocab_size}"
        return f"{self.family}-{shape}-{tied}-{self.dtype}-{self.seed}"

    def config(self) -> dict[str, Any]:
        """The Hugging Face `config.json`."""
        architecture = {
            "llama": "LlamaForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
        }[self.family]
        experts = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.intermediate_size,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "head_dim": self.hidden_size // self.num_heads,
        }
        return (experts if self.family == "qwen3_moe" else {}) | {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name → shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        head = hidden // self.num_heads
        kv = head * self.num_kv_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
                shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
                if self.family == "qwen2":
                    shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
            feed_forwards = ["mlp."]
            if self.family == "qwen3_moe":
                shapes[f"{prefix}self_attn.q_norm.weight"] = (head,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (head,)
                shapes[f"{prefix}mlp.gate.weight"] = (self.num_experts, hidden)
                feed_forwards = [f"mlp.experts.{expert}." for expert in range(self.num_experts)]
            for part in feed_forwards:
                shapes[f"{prefix}{part}gate_proj.weight"] = (inner, hidden)
                shapes[f"{prefix}{part}up_proj.weight"] = (inner, hidden)
                shapes[f"{prefix}{part}down_proj.weight"] = (hidden, inner)
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def write_model(spec: TinySpec, folder: Path) -> Path:
    """`folder/<name>` with config, weights and tokenizer; made once, then reused."""
    import torch
    from safetensors.torch import save_file

    target = folder / spec.name
    if (target / "model.safetensors").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(spec.seed)
    tensors = {}
    for name, shape in spec.tensors().items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif "embed_tokens" in name:
            values = 0.1 * values  # the layers, not the last token, decide the next one
        else:
            values = values * (1.5 / shape[-1] ** 0.5)
        tensors[name] = values.to(getattr(torch, spec.dtype)).contiguous()
    (target / "config.json").write_text(json.dumps(spec.config(), indent=2))
    _write_tokenizer(target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _write_tokenizer(folder: Path) -> None:
    """Bytes 0..255 as tokens 3..258, after `<unk> <s> </s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_pool(folder: Path, path: Path) -> PoolView:
    """Lay the safetensors of `folder` out in the file `path`, tensors aligned to `ALIGNMENT` bytes."""
    tensors: list[PoolTensor] = []
    spans: list[tuple[Path, int, int]] = []
    offset = 0
    for source in sorted(folder.glob("*.safetensors")):
        with source.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensor = PoolTensor(
                name=name,
                dtype=_DTYPES[entry["dtype"]],
                shape=tuple(entry["shape"]),
                offset_bytes=offset,
            )
            tensors.append(tensor)
            spans.append((source, 8 + header_bytes + begin, end - begin))
            offset = -(-(offset + end - begin) // ALIGNMENT) * ALIGNMENT
    with path.open("wb+") as file:
        file.truncate(offset)
        with mmap.mmap(file.fileno(), offset) as pool:
            for tensor, (source, start, size) in zip(tensors, spans, strict=True):
                with source.open("rb") as checkpoint:
                    checkpoint.seek(start)
                    pool[tensor.offset_bytes : tensor.offset_bytes + size] = checkpoint.read(size)
    return PoolView(path=str(path), nbytes=offset, tensors=tuple(tensors))


def write_random_pool(spec: TinySpec, path: Path) -> PoolView:
    """A pool of random weights of any size, without a checkpoint: one random block, shifted and repeated."""
    import torch

    dtype = getattr(torch, spec.dtype)
    tensors: list[PoolTensor] = []
    offset = 0
    for name, shape in spec.tensors().items():
        tensors.append(PoolTensor(name=name, dtype=spec.dtype, shape=shape, offset_bytes=offset))
        nbytes = math.prod(shape) * dtype.itemsize
        offset = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
    with path.open("wb+") as file:
        file.truncate(offset)
    pool = torch.from_file(str(path), shared=True, size=offset, dtype=torch.uint8)
    block = torch.randn(4_000_037, generator=torch.Generator().manual_seed(spec.seed))
    for index, tensor in enumerate(tensors):
        numel = math.prod(tensor.shape)
        target = pool[tensor.offset_bytes : tensor.offset_bytes + numel * dtype.itemsize].view(dtype)
        if "norm" in tensor.name:
            target.fill_(1)
            continue
        scale = 0.05 if "embed_tokens" in tensor.name else 1.0 / tensor.shape[-1] ** 0.5
        values = (block.roll(7919 * index) * scale).to(dtype)
        for start in range(0, numel, len(values)):
            part = target[start : start + len(values)]
            part.copy_(values[: len(part)])
    return PoolView(path=str(path), nbytes=offset, tensors=tuple(tensors))
