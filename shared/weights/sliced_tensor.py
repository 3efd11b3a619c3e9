"""A tensor that is stored slice by slice, as a source of the copies that a loader map makes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.layout.sliced_storage import SlicedStorage
from shared.layout.tensor_layout import Box
from shared.weights.stored_parts import at
from shared.weights.strided import StridedView, box_of, copy_into, row_major_strides


@dataclass(frozen=True, slots=True)
class SlicedTensor:
    """`stored` has the elements in storage order, one dimension."""

    stored: torch.Tensor
    storage: SlicedStorage

    def element_size(self) -> int:
        return int(self.stored.element_size())

    def copy_view(
        self,
        view: StridedView,
        target: torch.Tensor,
        stage: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`target.copy_(tensor[view])`, where `tensor` is the row-major tensor that this one stands for.

        A view of a box is copied slice by slice, each from one contiguous range where the box holds all of
        it; any other view goes through a row-major copy of the tensor.
        """
        box = self._box_of(view)
        if box is None:
            whole = self._unpacked()
            flat = whole.view(-1) if stage is None else stage(whole.view(-1))
            target.copy_(view.on(flat))
            return
        kept = [dim for dim, size in enumerate(box.shape) if size != 1]
        squeezed = target.squeeze()
        for piece in self.storage.pieces_of(box):
            part = self.stored[piece.offset : piece.offset + piece.stored.numel]
            near = [
                slice(a, a + n) for a, n in zip(piece.inside_of(box).start, piece.common.shape, strict=True)
            ]
            place = squeezed[tuple(near[dim] for dim in kept)]
            if stage is not None and piece.common != piece.stored:
                part = stage(part)
            copy_into(place, _drop(part.view(piece.stored.shape)[at(piece.inside)], kept))

    def _box_of(self, view: StridedView) -> Box | None:
        """The box that `view` walks in row-major order, or None."""
        shape = self.storage.shape
        found = box_of("", shape, view)
        if found.flat_start is not None:
            return None
        strides = row_major_strides(shape)
        walked = [(n, s) for n, s in zip(view.size, view.stride, strict=True) if n != 1]
        expected = [(n, s) for n, s in zip(found.shape, strides, strict=True) if n != 1]
        return Box(found.start, found.shape) if walked == expected else None

    def _unpacked(self) -> torch.Tensor:
        whole = torch.empty(self.storage.shape, dtype=self.stored.dtype)
        everything = Box((0,) * len(self.storage.shape), self.storage.shape)
        for piece in self.storage.pieces_of(everything):
            part = self.stored[piece.offset : piece.offset + piece.stored.numel]
            whole[at(piece.stored)] = part.view(piece.stored.shape)
        return whole


def _drop(part: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """`part` without the dimensions that are not `kept`, which have one element."""
    return part[tuple(slice(None) if dim in kept else 0 for dim in range(part.dim()))]
