"""Tiny random checkpoints of many architectures, made by transformers: its names, shapes and configs."""

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": 64},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "glm4": {"attention_bias": True},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
"""Whose loaders, or models, do more than views and copies."""

EXPERTS = ("qwen3_moe", "glm4_moe")


def write_family(family: str, folder: Path) -> Path:
    """`folder/<family>` with config and float32 weights, every one random; made once, then reused."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    target = folder / family
    if (target / "config.json").exists():
        return target
    settings = {**COMMON, **(FAMILIES | OTHERS)[family]}
    if family in OTHERS:  # whose head_dim follows from the rest
        del settings["head_dim"]
    config = AutoConfig.for_model(settings.pop("model_type", family), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(target)
    return target
