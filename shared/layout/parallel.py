"""How engines and pipeline stages cut a model: tensor parallelism, experts, fused regions, layer ranges."""

from collections.abc import Sequence
from itertools import pairwise

from shared.layout.tensor_layout import Box, Layout, Pattern, TensorSpec, layout_by, narrow, whole

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


def split_box(spec: TensorSpec, dim: int, part: int, parts: int, padded_size: int | None = None) -> Box:
    """Part `part` of `parts` equal cuts along `dim`, of `padded_size` (default: the size) clipped to the
    tensor.

    A vocabulary of 10 rows padded to 12 on 4 ranks: rows [0,3) [3,6) [6,9) [9,10).
    Raises ValueError if the (padded) size does not divide.
    """
    size = spec.shape[dim] if padded_size is None else padded_size
    if size % parts or size < spec.shape[dim]:
        raise ValueError(f"{spec.name}: size {size} of dimension {dim} cannot be cut into {parts} parts")
    start = min(part * (size // parts), spec.shape[dim])
    stop = min((part + 1) * (size // parts), spec.shape[dim])
    return narrow(spec, dim, start, stop - start)


def split_fused(spec: TensorSpec, dim: int, sizes: Sequence[int], part: int, parts: int) -> tuple[Box, ...]:
    """Part `part` of each fused region (q|k|v, gate|up) of the given `sizes` along `dim`: one box per region.

    A gate-up weight of 8 rows fused as (4, 4), part 1 of 2: rows [2,4) and [6,8).
    """
    if sum(sizes) != spec.shape[dim] or any(size % parts for size in sizes):
        raise ValueError(f"{spec.name}: fused sizes {tuple(sizes)} do not fit {spec.shape} in {parts} parts")
    boxes, offset = [], 0
    for size in sizes:
        boxes.append(narrow(spec, dim, offset + part * (size // parts), size // parts))
        offset += size
    return tuple(boxes)


def layer_of(name: str, marker: str = "layers") -> int | None:
    """Layer number in a tensor name, or None for embeddings, final norm and head.

    >>> layer_of("model.layers.12.mlp.up_proj.weight")
    12
    """
    parts = name.split(".")
    for left, right in pairwise(parts):
        if left == marker and right.isdigit():
            return int(right)
    return None


def stage_tensors(
    specs: Sequence[TensorSpec], first_layer: int, last_layer: int, *, with_input: bool, with_output: bool
) -> tuple[TensorSpec, ...]:
    """Tensors of a pipeline stage of layers `[first_layer, last_layer)`.

    A tensor outside the layers belongs to the input end if its name contains "embed", else to the output
    end. With tied embeddings the last stage needs the input embedding as well: the caller adds it.
    """
    chosen = []
    for spec in specs:
        layer = layer_of(spec.name)
        if layer is None:
            is_input = "embed" in spec.name
            keep = with_input if is_input else with_output
        else:
            keep = first_layer <= layer < last_layer
        if keep:
            chosen.append(spec)
    return tuple(chosen)


def expert_of(name: str) -> int | None:
    """Expert number in a tensor name, or None.

    >>> expert_of("model.layers.3.mlp.experts.17.up_proj.weight")
    17
    """
    return layer_of(name, marker="experts")


def cut_dimension(name: str) -> int | None:
    """Along which dimension tensor parallelism cuts a checkpoint tensor; None if every rank has it whole.

    Output features (rows) of q, k, v, gate, up, embedding and head; input features (columns) of o and down.

    >>> cut_dimension("model.layers.0.mlp.down_proj.weight"), cut_dimension("model.norm.weight")
    (1, None)
    """
    parts = name.split(".")
    if any(part in _BY_COLUMNS for part in parts):
        return 1 if parts[-1] == "weight" else None
    return 0 if any(part in _BY_ROWS for part in parts) else None


def engine_layout(
    specs: Sequence[TensorSpec],
    replicas: Sequence[Sequence[str]],
    *,
    num_kv_heads: int | None = None,
    is_expert_parallel: bool = False,
) -> Layout:
    """Every replica has the model, cut over its devices as a tensor parallel engine cuts it.

    Experts go whole to rank e * size // experts under expert parallelism. Where there are more ranks than
    `num_kv_heads`, neighbours have the same head. Raises ValueError if a size does not divide.
    """
    num_experts = 1 + max((e for s in specs if (e := expert_of(s.name)) is not None), default=-1)

    def cut(spec: TensorSpec, rank: int, size: int) -> Box:
        if (dim := cut_dimension(spec.name)) is None:
            return whole(spec)
        is_kv = "k_proj" in spec.name or "v_proj" in spec.name
        parts = min(size, num_kv_heads) if is_kv and num_kv_heads else size
        return split_box(spec, dim, rank * parts // size, parts)

    def pattern(spec: TensorSpec) -> Pattern:
        expert = expert_of(spec.name) if is_expert_parallel else None
        found: list[tuple[Box, str]] = []
        for ranks in replicas:
            if expert is None:
                found += [(cut(spec, rank, len(ranks)), name) for rank, name in enumerate(ranks)]
            else:
                found.append((whole(spec), ranks[expert * len(ranks) // num_experts]))
        return tuple((box, name) for box, name in found if box.numel)

    def kind(spec: TensorSpec) -> tuple[object, ...]:
        expert = expert_of(spec.name) if is_expert_parallel else None
        if expert is not None:
            return (spec.shape, *(expert * len(ranks) // num_experts for ranks in replicas))
        return spec.shape, cut_dimension(spec.name), "k_proj" in spec.name or "v_proj" in spec.name

    return layout_by(specs, kind, pattern)
