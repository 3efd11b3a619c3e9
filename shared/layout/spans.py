"""Boxes as byte spans: what a transport copies. A span is (offset, length) in bytes; arrays are int64 of
shape (n, 2)."""

import numpy as np
from numpy.typing import NDArray

from shared.layout.tensor_layout import Box

Spans = NDArray[np.int64]


def box_spans(shape: tuple[int, ...], box: Box, itemsize: int, base_bytes: int = 0) -> Spans:
    """Spans of `box` in a row-major tensor of `shape` that begins at `base_bytes`, in row-major order of the
    box.

    Whole inner dimensions are one span. A (2, 3) box at (1, 1) of a (4, 5) tensor of 2 bytes: (12, 6), (22,
    6).
    """
    return _spans(shape, box, itemsize, base_bytes, _num_outer(shape, box))


def _num_outer(shape: tuple[int, ...], box: Box) -> int:
    """How many outer dimensions have to be walked; the rest of `box` is one run."""
    outer = len(shape)
    while outer and (outer == len(shape) or box.shape[outer] == shape[outer]):
        outer -= 1
    return outer


def _spans(shape: tuple[int, ...], box: Box, itemsize: int, base_bytes: int, outer: int) -> Spans:
    run = itemsize
    for size in box.shape[outer:]:
        run *= size
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    first = base_bytes + sum(a * stride for a, stride in zip(box.start, strides, strict=True))
    offsets = np.array([first], np.int64)
    for dim in range(outer):
        steps = np.arange(box.shape[dim], dtype=np.int64) * strides[dim]
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    return np.stack([offsets, np.full_like(offsets, run)], axis=1)


Place = tuple[tuple[int, ...], Box]
"""Shape of a row-major array, and a box of it."""


def pair_spans(left: Place, right: Place, itemsize: int, bases_bytes: tuple[int, int]) -> tuple[Spans, Spans]:
    """Spans of two boxes of one shape in two arrays, cut alike: row i of both are the ends of one copy."""
    assert left[1].shape == right[1].shape, "ends of a copy differ"
    outer = max(_num_outer(*left), _num_outer(*right))
    return (
        _spans(*left, itemsize, bases_bytes[0], outer),
        _spans(*right, itemsize, bases_bytes[1], outer),
    )


def merge_spans(left: Spans, right: Spans) -> tuple[Spans, Spans]:
    """Join neighbours that continue each other on *both* sides, so that one descriptor moves them.

    Row i of `left` and of `right` are the two ends of one copy and have equal lengths.
    """
    assert np.array_equal(left[:, 1], right[:, 1]), "ends of a copy differ"
    if len(left) < 2:
        return left, right
    follows = (left[:-1].sum(axis=1) == left[1:, 0]) & (right[:-1].sum(axis=1) == right[1:, 0])
    heads = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    lengths = np.add.reduceat(left[:, 1], heads)
    return np.stack([left[heads, 0], lengths], axis=1), np.stack([right[heads, 0], lengths], axis=1)
