"""Hypothesis strategies of whole models and of the layouts that engines, ranks and GPS keep them in."""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from shared.layout.parallel import engine_layout, split_box, split_fused, stage_tensors
from shared.layout.replication import grouped_layout
from shared.layout.tensor_layout import (
    Box,
    FlatRange,
    Layout,
    Placement,
    Region,
    TensorSpec,
    full_layout,
    index_specs,
    merge_layouts,
    zero_layout,
)

HEADS, KV_HEADS, EXPERTS = 4, 2, 4
DTYPES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    """A small model: mixed dtypes, a vocabulary that no world divides, a fused qkv, experts, scalars."""
    hidden, layers = draw(st.sampled_from([4, 8, 12])), draw(st.integers(1, 3))
    ffn, vocabulary = 4 * draw(st.integers(1, 3)), draw(st.integers(3, 11))

    def spec(name: str, *shape: int) -> TensorSpec:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        return TensorSpec(name, dtype, DTYPES[dtype], shape)

    found = [spec("model.embed_tokens.weight", vocabulary, hidden)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found += [
            spec(f"{at}.self_attn.qkv.weight", 8 + 4 + 4, hidden),
            spec(f"{at}.self_attn.o_proj.weight", hidden, 8),
            spec(f"{at}.mlp.down_proj.weight", hidden, ffn),
            spec(f"{at}.norm.weight", hidden),
            spec(f"{at}.scale"),
        ]
        found += [spec(f"{at}.mlp.experts.{e}.up_proj.weight", ffn, hidden) for e in range(EXPERTS)]
    found.append(spec("model.norm.weight", hidden))
    if draw(st.booleans()):  # else the head is tied to the embedding
        found.append(spec("lm_head.weight", vocabulary, hidden))
    return found


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _tensor_parallel(draw: st.DrawFn, specs: Sequence[TensorSpec], prefix: str) -> Layout:
    """Replicas of a padded, fused, tensor (and perhaps expert) parallel engine."""
    size, replicas = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    is_expert_parallel = draw(st.booleans())
    layouts = []
    for replica in range(replicas):
        ranks = names(f"{prefix}{replica}.", size)
        plain, special = [], []
        for spec in specs:
            if "embed" in spec.name or "head" in spec.name:
                padded = -(-spec.shape[0] // size) * size
                special += [
                    Placement(spec.name, split_box(spec, 0, r, size, padded), name)
                    for r, name in enumerate(ranks)
                ]
            elif "qkv" in spec.name:
                special += [
                    Placement(spec.name, box, name)
                    for r, name in enumerate(ranks)
                    for box in split_fused(spec, 0, (8, 4, 4), r, size)
                ]
            else:
                plain.append(spec)
        layouts.append(Layout(index_specs(specs), special))
        layouts.append(engine_layout(plain, [ranks], is_expert_parallel=is_expert_parallel))
    return merge_layouts(layouts)


def _zero(draw: st.DrawFn, specs: Sequence[TensorSpec], prefix: str) -> Layout:
    return zero_layout(specs, names(prefix, draw(st.integers(1, 5))))


def _groups(draw: st.DrawFn, specs: Sequence[TensorSpec], prefix: str) -> Layout:
    total = sum(spec.nbytes for spec in specs)
    try:
        return grouped_layout(
            specs, names(prefix, draw(st.integers(1, 5))), total // draw(st.integers(1, 2))
        ).layout
    except ValueError:  # a share of half the model does not come out on one node
        return grouped_layout(specs, names(prefix, 2), total).layout


def _pipeline(draw: st.DrawFn, specs: Sequence[TensorSpec], prefix: str) -> Layout:
    """Two stages; with tied embeddings the last one has the input embedding too."""
    cut = draw(st.integers(0, 3))
    first = list(stage_tensors(specs, 0, cut, with_input=True, with_output=False))
    last = list(stage_tensors(specs, cut, 99, with_input=False, with_output=True))
    if not any("head" in spec.name for spec in specs):
        last.insert(0, specs[0])
    return merge_layouts([full_layout(first, [f"{prefix}0"]), full_layout(last, [f"{prefix}1"])])


def _copies(draw: st.DrawFn, specs: Sequence[TensorSpec], prefix: str) -> Layout:
    return full_layout(specs, names(prefix, draw(st.integers(1, 3))))


Kind = Callable[[st.DrawFn, Sequence[TensorSpec], str], Layout]
KINDS: tuple[Kind, ...] = (_tensor_parallel, _zero, _groups, _pipeline, _copies)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    numel = int(np.prod(shape, dtype=int))
    if draw(st.booleans()):
        start = draw(st.integers(0, numel))
        return FlatRange(start, draw(st.integers(0, numel - start)))
    starts = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(starts, tuple(draw(st.integers(0, n - a)) for a, n in zip(starts, shape, strict=True)))


@st.composite
def sides(draw: st.DrawFn, specs: Sequence[TensorSpec], prefix: str) -> Layout:
    """One side of a transfer: one or two of the kinds together, and odd parts of some tensors besides."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    layouts = [kind(draw, specs, f"{prefix}{i}-") for i, kind in enumerate(kinds)]
    odd = [
        Placement(spec.name, draw(regions(spec.shape)), f"{prefix}-odd")
        for spec in draw(st.lists(st.sampled_from(specs), max_size=2))
    ]
    return merge_layouts([*layouts, Layout(index_specs(specs), odd)])


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A source and a target of one model."""
    specs = draw(models())
    return draw(sides(specs, "s")), draw(sides(specs, "t"))
