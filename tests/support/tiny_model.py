"""Random models of a few megabytes, in Hugging Face folders and in pool files.

`write_model` makes a folder (config, safetensors, byte-level tokenizer); `write_pool` lays its tensors out in
one file the way GPS lays a version out in shared memory.
"""

import json
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

    family: Literal["llama", "qwen2"] = "llama"
    vocab_size: int = 1000
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    seed: int = 0

    @property
    def name(self) -> str:
        tied = "tied" if self.tie_word_embeddings else "untied"
        shape = f"{self.hidden_size}x{self.num_layers}-v{self.vocab_size}"
        return f"{self.family}-{shape}-{tied}-{self.dtype}-{self.seed}"

    def config(self) -> dict[str, Any]:
        """The Hugging Face `config.json`."""
        architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[self.family]
        return {
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
            shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
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
        elif "embed_tokens" not in name:
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
    """Lay `folder/model.safetensors` out in the file `path`, tensors aligned to `ALIGNMENT` bytes."""
    raw = (folder / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(raw[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    tensors, spans, offset = [], [], 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors.append(
            PoolTensor(
                name=name,
                dtype=_DTYPES[entry["dtype"]],
                shape=tuple(entry["shape"]),
                offset_bytes=offset,
            )
        )
        spans.append((offset, 8 + header_bytes + begin, end - begin))
        offset = -(-(offset + end - begin) // ALIGNMENT) * ALIGNMENT
    with path.open("wb+") as file:
        file.truncate(offset)
        with mmap.mmap(file.fileno(), offset) as pool:
            for target, source, size in spans:
                pool[target : target + size] = raw[source : source + size]
    return PoolView(path=str(path), nbytes=offset, tensors=tuple(tensors))
