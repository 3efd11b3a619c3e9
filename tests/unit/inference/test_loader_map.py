"""Recording a loader: fused and padded parameters, and everything that must be refused."""

from collections.abc import Callable, Iterable

import pytest

from shared.contracts.gps import PoolTensor
from shared.errors import LayoutError

torch = pytest.importorskip("torch")

from shared.weights.loader_map import LoaderMap  # noqa: E402
from shared.weights.strided import StridedView  # noqa: E402

Weights = Iterable[tuple[str, "torch.Tensor"]]


def source(name: str, *shape: int, dtype: str = "float32") -> PoolTensor:
    return PoolTensor(name=name, dtype=dtype, shape=shape, offset_bytes=0)


class Fused(torch.nn.Module):
    """q (6×4) and k (2×4) fused; an embedding of 5 rows padded to 8; a norm; a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.empty(8, 4), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.empty(8, 4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.empty(4), requires_grad=False)
        self.head = self.embed

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk.data[:6].copy_(tensor)
            elif name == "k":
                self.qk.data.narrow(0, 6, 2).copy_(tensor)
            elif name == "embed":
                self.embed[:5].data.copy_(tensor)
                self.embed[5:].data.fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor)


SOURCES = (
    source("q", 6, 4),
    source("k", 2, 4),
    source("embed", 5, 4),
    source("norm", 4),
    source("head", 5, 4),
)


def record(
    load: Callable[["Fused", str, "torch.Tensor"], None] | None = None,
    sources: tuple[PoolTensor, ...] = SOURCES,
) -> LoaderMap:
    with torch.device("meta"):
        model = Fused()
    if load is None:
        return LoaderMap.record(model, sources)

    def loader(weights: Weights) -> None:
        for name, tensor in weights:
            load(model, name, tensor)

    return LoaderMap.record(model, sources, loader)


def fused_load(model: "Fused", name: str, tensor: "torch.Tensor") -> None:
    model.load_weights([(name, tensor)])


def test_a_replay_equals_the_loader() -> None:
    loaded, read = Fused(), Fused()
    tensors = {s.name: torch.randn(s.shape) for s in SOURCES}
    loaded.load_weights(tensors.items())
    parameters = dict(read.named_parameters(remove_duplicate=False))
    assert record().apply(tensors, parameters) == 4 * (24 + 8 + 20 + 4)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, parameters[name])


def test_what_is_read_and_what_is_not() -> None:
    recorded = record()
    assert recorded.unread == ("head",)
    assert recorded.parameters["embed"].aliases == ("head",)
    assert [(box.tensor, box.start, box.shape) for box in recorded.boxes()] == [
        ("q", (0, 0), (6, 4)),
        ("k", (0, 0), (2, 4)),
        ("embed", (0, 0), (5, 4)),
        ("norm", (0,), (4,)),
    ]
    assert recorded.fits(SOURCES)
    assert not recorded.fits((source("q", 6, 4, dtype="bfloat16"), *SOURCES[1:]))


def test_a_part_can_be_read_alone() -> None:
    tensors = {s.name: torch.randn(s.shape) for s in SOURCES}
    live = {"norm": torch.zeros(4)}
    assert record().apply(tensors, live, only=("norm",)) == 16
    assert torch.equal(live["norm"], tensors["norm"])


def test_a_slice_of_columns_is_a_box_and_can_be_staged() -> None:
    def columns(model: Fused, name: str, tensor: torch.Tensor) -> None:
        if name == "q":
            model.qk.data[:6].copy_(tensor[:, 4:8])
        else:
            fused_load(model, name, tensor)

    sources = (source("q", 6, 12), *SOURCES[1:])
    recorded = record(columns, sources)
    assert recorded.boxes()[0].model_dump(include={"start", "shape"}) == {"start": (0, 4), "shape": (6, 4)}
    tensors = {s.name: torch.randn(s.shape) for s in sources}
    plain, staged, sizes = torch.zeros(8, 4), torch.zeros(8, 4), []

    def stage(host: torch.Tensor) -> torch.Tensor:
        assert host.is_contiguous()
        sizes.append(host.numel())
        return host.clone()

    recorded.apply(tensors, {"qk": plain}, only=("qk",))
    recorded.apply(tensors, {"qk": staged}, only=("qk",), stage=stage)
    assert torch.equal(plain, staged)
    assert sizes == [5 * 12 + 4]


def test_a_copy_may_convert_the_dtype() -> None:
    sources = tuple(s.model_copy(update={"dtype": "bfloat16"}) for s in SOURCES)
    tensors = {s.name: torch.randn(s.shape, dtype=torch.bfloat16) for s in sources}
    live = {"norm": torch.zeros(4)}
    record(sources=sources).apply(tensors, live, only=("norm",))
    assert torch.equal(live["norm"], tensors["norm"].float())


REFUSED: dict[str, tuple[Callable[["torch.Tensor"], "torch.Tensor"], str]] = {
    "arithmetic": (lambda t: t * 2, "mul"),
    "arithmetic in place": (lambda t: t.add_(1), "add_"),
    "concatenation": (lambda t: torch.cat([t[:3], t[3:]]), "cat"),
    "a cast beforehand": (lambda t: t.to(torch.float64), "_to_copy"),
    "a temporary": (lambda t: torch.empty_like(t).copy_(t), "empty_like"),
    "another reading of the bytes": (lambda t: t.view(torch.int32), "view"),
    "a transposed clone": (lambda t: t.t().reshape(24).view(6, 4), "clone"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_but_views_and_copies_is_refused(case: str) -> None:
    change, operator = REFUSED[case]

    def load(model: Fused, name: str, tensor: torch.Tensor) -> None:
        fused_load(model, name, change(tensor) if name == "q" else tensor)

    with pytest.raises(LayoutError, match=f"checkpoint tensor q: .*{operator}"):
        record(load)


def test_a_refusal_that_the_loader_swallows_still_fails() -> None:
    def load(model: Fused, name: str, tensor: torch.Tensor) -> None:
        try:
            fused_load(model, name, tensor * 2 if name == "k" else tensor)
        except LayoutError:
            fused_load(model, name, tensor)

    with pytest.raises(LayoutError, match="checkpoint tensor k"):
        record(load)


def test_a_loader_that_does_not_know_a_tensor_fails() -> None:
    def load(model: Fused, name: str, tensor: torch.Tensor) -> None:
        raise KeyError(name)

    with pytest.raises(LayoutError, match="checkpoint tensor q: the engine's loader refused it"):
        record(load)


def test_a_gap_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"parameter qk: .*unwritten"):
        record(sources=tuple(s for s in SOURCES if s.name != "k"))


def test_padding_that_nobody_fills_is_refused() -> None:
    def load(model: Fused, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            model.embed.data[:5].copy_(tensor)
        else:
            fused_load(model, name, tensor)

    with pytest.raises(LayoutError, match=r"parameter embed: .*unwritten"):
        record(load)


def test_an_element_copied_twice_is_refused() -> None:
    def load(model: Fused, name: str, tensor: torch.Tensor) -> None:
        if name == "k":
            model.qk.data[5:7].copy_(tensor)
        else:
            fused_load(model, name, tensor)

    with pytest.raises(LayoutError, match="parameter qk: some elements are copied twice"):
        record(load)


def test_zeroing_first_is_fine_and_zeroing_afterwards_is_not() -> None:
    def before(model: Fused, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            model.embed.data.zero_()
            model.embed.data[:5].copy_(tensor)
        else:
            fused_load(model, name, tensor)

    def after(model: Fused, name: str, tensor: torch.Tensor) -> None:
        fused_load(model, name, tensor)
        if name == "embed":
            model.embed.data.zero_()

    tensors = {s.name: torch.randn(s.shape) for s in SOURCES}
    live = {"embed": torch.full((8, 4), float("nan"))}
    record(before).apply(tensors, live, only=("embed",))
    assert torch.equal(live["embed"][:5], tensors["embed"])
    assert live["embed"][5:].abs().sum() == 0
    with pytest.raises(LayoutError, match="parameter embed: a fill overwrites"):
        record(after)


def test_a_live_parameter_of_another_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="parameter norm: has shape"):
        record().apply(
            {s.name: torch.zeros(s.shape) for s in SOURCES}, {"norm": torch.zeros(0)}, only=("norm",)
        )


@pytest.mark.parametrize(
    ("size", "stride", "intervals"),
    [
        ((3, 4), (4, 1), [(2, 14)]),
        ((4, 3), (1, 4), [(2, 14)]),  # transposed: the same elements
        ((3, 2), (10, 1), [(2, 4), (12, 14), (22, 24)]),
        ((1, 2, 1), (99, 1, 7), [(2, 4)]),
        ((), (), [(2, 3)]),
    ],
)
def test_intervals_of_a_view(
    size: tuple[int, ...], stride: tuple[int, ...], intervals: list[tuple[int, int]]
) -> None:
    starts, ends = StridedView(2, size, stride).intervals()
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == intervals
