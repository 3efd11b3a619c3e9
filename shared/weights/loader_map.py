"""Canonical checkpoint tensors → an engine's fused parameters, *recorded* from the engine's own loader.

An engine fuses q, k and v, or gate and up, pads the vocabulary, and cuts for tensor parallelism. Nobody
writes that down a second time here: the model is built on the meta device (shapes, no memory), its own
`load_weights` runs once on meta tensors named like the checkpoint, and every `copy_` it makes is recorded as

    (checkpoint tensor, strided view)  →  (parameter, strided view)        in elements

Replaying the copies on real memory is then the Read of paper §5.1. What must hold, or recording fails with
`LayoutError` naming the checkpoint tensor and the operation:
  - between a checkpoint tensor and a parameter there are only views and `copy_` (which may convert the
    dtype); concatenation, arithmetic, casting beforehand and reinterpretation of bytes are refused;
  - every element of every parameter is written by exactly one copy, or filled with a constant (padding).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.contracts.gps import PoolTensor, TensorBox
from shared.errors import LayoutError, PivotError
from shared.weights.sliced_tensor import SlicedTensor
from shared.weights.strided import Intervals, StridedView, box_of, copy_into, merged, overlap, staged


@dataclass(frozen=True, slots=True)
class Copy:
    """`parameter[parameter_view].copy_(source[source_view])`. A broadcast source has strides of 0."""

    source: str
    source_view: StridedView
    parameter: str
    parameter_view: StridedView


@dataclass(frozen=True, slots=True)
class Fill:
    """`parameter[parameter_view].fill_(value)`: padding."""

    parameter: str
    parameter_view: StridedView
    value: float


Operation = Copy | Fill


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter before the engine repacks it. `aliases` are other names of its memory (tied weights)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoaderMap:
    """The recorded copies of one rank of one model.

    `unread` are checkpoint tensors the loader skipped, such as a tied head.
    """

    sources: tuple[PoolTensor, ...]
    parameters: Mapping[str, ParameterSpec]
    operations: tuple[Operation, ...]
    unread: tuple[str, ...]
    _of: Mapping[str, tuple[Operation, ...]] = field(repr=False)

    @classmethod
    def record(
        cls,
        model: torch.nn.Module,
        sources: Sequence[PoolTensor],
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = None,
    ) -> "LoaderMap":
        """Run `load` (by default `model.load_weights`) of a model on the meta device and keep what it does.

        Only names, dtypes and shapes of `sources` matter. Raises `LayoutError`.
        """
        recorder = _Recorder(model, sources)
        loader: Any = load if load is not None else model.load_weights
        try:
            with recorder, torch.no_grad():
                loader(recorder.weights())
        except PivotError:
            raise
        except Exception as error:
            raise LayoutError(
                f"checkpoint tensor {recorder.current}: the engine's loader refused it: {error}",
                tensor=recorder.current,
            ) from error
        if recorder.failure is not None:  # a loader may swallow what was raised inside it
            raise recorder.failure
        operations = tuple(recorder.operations)
        grouped: dict[str, list[Operation]] = {name: [] for name in recorder.parameters}
        for operation in operations:
            grouped.setdefault(operation.parameter, []).append(operation)
        for name, spec in recorder.parameters.items():
            _check_complete(name, spec, grouped[name])
        read = {operation.source for operation in operations if isinstance(operation, Copy)}
        return cls(
            sources=tuple(sources),
            parameters=recorder.parameters,
            operations=operations,
            unread=tuple(source.name for source in sources if source.name not in read),
            _of={name: tuple(found) for name, found in grouped.items()},
        )

    def fits(self, sources: Sequence[PoolTensor]) -> bool:
        """Whether a checkpoint has the names, dtypes and shapes this map was recorded for."""
        return _signature(self.sources) == _signature(sources)

    def apply(
        self,
        sources: Mapping[str, torch.Tensor | SlicedTensor],
        parameters: Mapping[str, torch.Tensor],
        only: Collection[str] | None = None,
        stage: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> int:
        """Make the copies and return the bytes read; `only` limits them to some parameters.

        `stage`, given for a device, brings a *contiguous* host range over in one transfer; scattered source
        views then go through it and are picked apart on the device. Copies to a device do not block: the
        caller synchronises before it lets go of `sources`.
        """
        read_bytes = 0
        chosen = self.operations if only is None else [op for name in only for op in self._of[name]]
        with torch.no_grad():
            for operation in chosen:
                parameter = parameters[operation.parameter]
                expected = self.parameters.get(operation.parameter)
                if expected is not None and tuple(parameter.shape) != expected.shape:
                    raise LayoutError(
                        f"parameter {operation.parameter}: has shape {tuple(parameter.shape)}, "
                        f"recorded {expected.shape}",
                        parameter=operation.parameter,
                    )
                target = operation.parameter_view.on(parameter)
                if isinstance(operation, Fill):
                    target.fill_(operation.value)
                    continue
                source = sources[operation.source]
                read_bytes += operation.source_view.numel * source.element_size()
                if isinstance(source, SlicedTensor):
                    source.copy_view(operation.source_view, target, stage)
                elif stage is None or operation.source_view.is_contiguous:
                    copy_into(target, operation.source_view.on(source))
                else:
                    target.copy_(staged(operation.source_view, source, stage))
        return read_bytes

    def boxes(self) -> tuple[TensorBox, ...]:
        """What this rank Reads, in recording order, without repeats."""
        shapes = {source.name: source.shape for source in self.sources}
        found = {
            box_of(operation.source, shapes[operation.source], operation.source_view): None
            for operation in self.operations
            if isinstance(operation, Copy)
        }
        return tuple(found)


def _signature(sources: Iterable[PoolTensor]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(source.name, source.dtype, tuple(source.shape)) for source in sources}


def _check_complete(name: str, spec: ParameterSpec, operations: Sequence[Operation]) -> None:
    """Every element copied exactly once, or filled and not overwritten by a later fill."""
    copied: list[Intervals] = []
    filled: list[Intervals] = []
    for operation in operations:
        intervals = operation.parameter_view.intervals()
        if isinstance(operation, Copy):
            copied.append(intervals)
            continue
        if any(overlap(intervals, before) for before in copied):
            raise LayoutError(f"parameter {name}: a fill overwrites copied elements", parameter=name)
        filled.append(intervals)
    starts, ends = merged(copied)
    if (starts[1:] < ends[:-1]).any():
        raise LayoutError(f"parameter {name}: some elements are copied twice", parameter=name)
    starts, ends = merged(copied + filled)
    reach = np.maximum.accumulate(np.concatenate((np.zeros(1, dtype=np.int64), ends)))
    numel = int(np.prod(spec.shape, dtype=np.int64))
    if (starts > reach[:-1]).any() or int(reach[-1]) < numel:
        raise LayoutError(f"parameter {name}: the checkpoint leaves part of it unwritten", parameter=name)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator the loader runs. Memory is told apart by the identity of its (empty) storage."""

    def __init__(self, model: torch.nn.Module, sources: Sequence[PoolTensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.failure: LayoutError | None = None
        self.current = "(none yet)"
        self._sources = {
            source.name: torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")
            for source in sources
        }
        self._source_of = {_storage(tensor): name for name, tensor in self._sources.items()}
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(_storage(parameter), []).append(name)
            tensors.setdefault(_storage(parameter), parameter)
        self.parameters = {
            found[0]: ParameterSpec(tuple(tensors[key].shape), tensors[key].dtype, tuple(found[1:]))
            for key, found in names.items()
        }
        self._parameter_of = {key: found[0] for key, found in names.items()}
        for name, buffer in model.named_buffers():
            if not buffer.is_floating_point():  # a table that the loader may ask, such as whose an expert is
                continue
            self._parameter_of.setdefault(_storage(buffer), name)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._sources.items():
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = func._schema.name
        tracked = [t for t in _tensors((args, kwargs)) if self._is_tracked(t)]
        if tracked and operator == "aten::copy_":
            self._copy(args[0], args[1])
        elif tracked and operator in ("aten::fill_", "aten::zero_"):
            self._fill(args[0], args[1] if operator == "aten::fill_" else 0)
        elif tracked and (not func.is_view or str(func) == "aten.view.dtype"):
            self._refuse(f"the loader applies {func}, which is neither a view nor a copy")
        return func(*args, **kwargs)

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        key = _storage(tensor)
        return key in self._source_of or key in self._parameter_of

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        parameter, origin = self._parameter_of.get(_storage(target)), self._source_of.get(_storage(source))
        if parameter is None or origin is None:
            self._refuse("the loader copies it by way of temporary memory")
        elif target.numel():
            view = StridedView.of(source.expand(target.shape))
            self.operations.append(Copy(origin, view, parameter, StridedView.of(target)))

    def _fill(self, target: torch.Tensor, value: object) -> None:
        parameter = self._parameter_of.get(_storage(target))
        if parameter is None or not isinstance(value, int | float):
            self._refuse("the loader fills memory with something other than a constant")
        elif target.numel():
            self.operations.append(Fill(parameter, StridedView.of(target), float(value)))

    def _refuse(self, problem: str) -> None:
        error = LayoutError(f"checkpoint tensor {self.current}: {problem}", tensor=self.current)
        self.failure = self.failure or error
        raise error


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
