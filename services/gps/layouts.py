"""Which layouts a run's models are read and written in, and what of them is stored in slices for that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.ids import Role
from shared.layout.parallel import cut_dimension, engine_layout
from shared.layout.sliced_storage import SlicedStorage, slice_layouts
from shared.layout.tensor_layout import TensorSpec, zero_layout
from shared.runtime.config import RunConfig
from shared.runtime.topology import rank_devices


@dataclass(frozen=True, slots=True)
class Usage:
    """Who uses a model: replicas of `num_readers` tensor parallel devices, and `num_writers` training ranks,
    each with its ZeRO shard. Whoever takes it whole (an export, a checkpoint) cuts nothing."""

    num_readers: int = 1
    num_writers: int = 0

    def storages(self, specs: Sequence[TensorSpec]) -> Mapping[str, SlicedStorage]:
        """Storage of the tensors for which slices pay: none where no reader takes a range of columns.

        Only those are laid out. All other cuts, by rows and by ZeRO, are ranges of row-major storage anyway,
        and an engine may pad what does not divide there (a vocabulary). Replicas are cut alike: one stands
        for all.
        """
        cut = [spec for spec in specs if self._is_cut_by_columns(spec)]
        if not cut:
            return {}
        layouts = [engine_layout(cut, [_names("reader", self.num_readers)])]
        if self.num_writers:
            layouts.append(zero_layout(cut, _names("writer", self.num_writers)))
        return slice_layouts(layouts)

    def _is_cut_by_columns(self, spec: TensorSpec) -> bool:
        """Columns that do not divide stay row-major: no engine reads those as equal parts."""
        if self.num_readers == 1 or cut_dimension(spec.name) != 1 or len(spec.shape) < 2:
            return False
        return spec.numel > 0 and spec.shape[1] % self.num_readers == 0


UNCUT = Usage()


def policy_usage(config: RunConfig) -> Usage:
    """Rollout replicas read the policy, training ranks write it."""
    return Usage(config.tensor_parallel(Role.ROLLOUT), len(rank_devices(config)))


def genrm_usage(config: RunConfig) -> Usage:
    """Reward replicas read the GenRM; nobody writes it."""
    return Usage(config.tensor_parallel(Role.REWARD))


def _names(what: str, count: int) -> list[str]:
    return [f"{what}-{number}" for number in range(count)]
