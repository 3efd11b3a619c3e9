"""Strided views of a tensor as values: which elements, which box, which byte ranges."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.contracts.gps import TensorBox

Intervals = tuple[np.ndarray, np.ndarray]
"""Starts and ends of half-open element ranges, sorted by start."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """`tensor.as_strided(size, stride, offset)`, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StridedView":
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return int(np.prod(self.size, dtype=np.int64))

    @property
    def is_contiguous(self) -> bool:
        run = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != run:
                return False
            run *= size
        return True

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """This view of `tensor`, whose elements are contiguous from its own storage offset."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def intervals(self) -> Intervals:
        """The elements it touches.

        >>> StridedView(2, (3, 2), (10, 1)).intervals()
        (array([ 2, 12, 22]), array([ 4, 14, 24]))
        """
        dims = sorted(
            (stride, size) for size, stride in zip(self.size, self.stride, strict=True) if size != 1
        )
        run = 1
        while dims and dims[0][0] == run:
            run *= dims.pop(0)[1]
        starts = np.array([self.offset], dtype=np.int64)
        for stride, size in reversed(dims):
            starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).ravel()
        starts = np.sort(starts)
        return starts, starts + run


def merged(intervals: Sequence[Intervals]) -> Intervals:
    empty = np.zeros(0, dtype=np.int64)
    starts = np.concatenate([empty, *(i[0] for i in intervals)])
    ends = np.concatenate([empty, *(i[1] for i in intervals)])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def overlap(left: Intervals, right: Intervals) -> bool:
    starts, ends = merged([left, right])
    return bool((starts[1:] < np.maximum.accumulate(ends)[:-1]).any())


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`; a copy to or from a device does not block.

    What only the device's side scatters crosses in one transfer: torch packs or spreads it there, by way of
    device memory of its size.

    On host memory without conversion numpy copies: whole runs go through memcpy, which on large ones stores
    past the cache and is up to twice as fast as torch's kernel on one thread.
    """
    if target.is_cpu and source.is_cpu and target.dtype == source.dtype and target.numel():
        np.copyto(as_numpy(target), as_numpy(source.expand(target.shape)))
    else:
        target.copy_(source, non_blocking=target.is_cuda or source.is_cuda)


def wait_for_copies(tensor: torch.Tensor) -> None:
    """Until the copies to and from `tensor` that do not block are done."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """The same memory, as unsigned integers of the same width. Not `tensor.numpy()`: that makes the storage
    one that can never be resized, and an engine that sleeps gives its parameters' memory back so."""
    width = tensor.element_size()
    strides = tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * width)).from_address(tensor.data_ptr())
    nbytes = tuple(stride * width for stride in strides)
    return np.ndarray(tuple(tensor.shape), np.dtype(f"u{width}"), memory, 0, nbytes)


def staged(
    view: StridedView, source: torch.Tensor, stage: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`view` of `source`, by way of the one contiguous range that covers it."""
    last = view.offset + sum((s - 1) * d for s, d in zip(view.size, view.stride, strict=True))
    hull = stage(source.view(-1)[view.offset : last + 1])
    return StridedView(0, view.size, view.stride).on(hull)


def row_major_strides(shape: tuple[int, ...]) -> list[int]:
    """Strides of a contiguous tensor, in elements."""
    return [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]


def box_of(name: str, shape: tuple[int, ...], view: StridedView) -> TensorBox:
    """The box of `shape` that `view` reads, or the flat range that covers it where it is no box."""
    strides = row_major_strides(shape)
    extent = dict.fromkeys(strides, 1)
    for size, stride in zip(view.size, view.stride, strict=True):
        if size != 1 and stride in extent:
            extent[stride] *= size
    start, rest = [], view.offset
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    sizes = tuple(extent[s] if axis == strides.index(s) else 1 for axis, s in enumerate(strides))
    is_box = int(np.prod(sizes, dtype=np.int64)) == view.numel and all(
        first + size <= full for first, size, full in zip(start, sizes, shape, strict=True)
    )
    if is_box and shape:
        return TensorBox(tensor=name, start=tuple(start), shape=sizes)
    last = view.offset + sum((s - 1) * d for s, d in zip(view.size, view.stride, strict=True))
    return TensorBox(tensor=name, flat_start=view.offset, flat_count=last + 1 - view.offset)
