"""Tensor names and shapes of large checkpoints, without their values: what layouts are planned for."""

from shared.layout.tensor_layout import TensorSpec


def bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "bfloat16", 2, shape)


def _attention(at: str, hidden: int, q: int, kv: int, *, has_bias: bool) -> list[TensorSpec]:
    found = [
        bf16(f"{at}.self_attn.q_proj.weight", q, hidden),
        bf16(f"{at}.self_attn.k_proj.weight", kv, hidden),
        bf16(f"{at}.self_attn.v_proj.weight", kv, hidden),
        bf16(f"{at}.self_attn.o_proj.weight", hidden, q),
        bf16(f"{at}.input_layernorm.weight", hidden),
        bf16(f"{at}.post_attention_layernorm.weight", hidden),
    ]
    if has_bias:
        sizes = (("q", q), ("k", kv), ("v", kv))
        found += [bf16(f"{at}.self_attn.{name}_proj.bias", size) for name, size in sizes]
    return found


def _mlp(at: str, hidden: int, ffn: int) -> list[TensorSpec]:
    return [
        bf16(f"{at}.gate_proj.weight", ffn, hidden),
        bf16(f"{at}.up_proj.weight", ffn, hidden),
        bf16(f"{at}.down_proj.weight", hidden, ffn),
    ]


def _ends(hidden: int, vocabulary: int) -> list[TensorSpec]:
    return [
        bf16("model.embed_tokens.weight", vocabulary, hidden),
        bf16("model.norm.weight", hidden),
        bf16("lm_head.weight", vocabulary, hidden),
    ]


def dense(
    *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int
) -> list[TensorSpec]:
    """Shapes of a Qwen2.5 model."""
    kv = hidden // heads * kv_heads
    found = _ends(hidden, vocabulary)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found += _attention(at, hidden, hidden, kv, has_bias=True)
        found += _mlp(f"{at}.mlp", hidden, ffn)
    return found


def qwen_72b() -> list[TensorSpec]:
    """Qwen2.5-72B: 145 GB in 963 tensors."""
    return dense(layers=80, hidden=8192, ffn=29568, heads=64, kv_heads=8, vocabulary=152064)


def moe_122b(layers: int = 48, experts: int = 256) -> list[TensorSpec]:
    """A 122B mixture of experts with 10B active: 256 experts of 3 x 3072 x 1024, 8 routed and one shared, in
    each of 48 layers."""
    hidden, ffn = 3072, 1024
    found = _ends(hidden, 151936)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found += _attention(at, hidden, 4096, 512, has_bias=False)
        found += [bf16(f"{at}.mlp.gate.weight", experts, hidden)]
        found += _mlp(f"{at}.mlp.shared_expert", hidden, ffn)
        for expert in range(experts):
            found += _mlp(f"{at}.mlp.experts.{expert}", hidden, ffn)
    return found


def dense_of_size(nbytes: int) -> list[TensorSpec]:
    """A dense model of about `nbytes` (of at least one layer): hidden 2560, as many layers as fit."""
    ends, layer = 2 * 2 * 64000 * 2560, 2 * (2 * 2560 * 2560 + 2 * 512 * 2560 + 3 * 9728 * 2560)
    layers = max(1, round((nbytes - ends) / layer))
    return dense(layers=layers, hidden=2560, ffn=9728, heads=20, kv_heads=4, vocabulary=64000)
