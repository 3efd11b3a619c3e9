"""Checkpoints into the pool: single, sharded, other dtypes, and everything that can be wrong with a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.contracts.gps import PoolView
from shared.errors import ConfigError
from shared.weights.host_pool import MappedPool
from shared.weights.seed import load_seed, plan_seed


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file, written by hand: it is the format that is tested."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(d for _, _, d in tensors.values()))


def load(folder: Path, dtype: str = "bfloat16") -> MappedPool:
    plan = plan_seed(folder, dtype)
    memory = np.zeros(plan.nbytes, np.uint8)
    assert load_seed(plan, memory) == sum(source.nbytes for source in plan.sources)
    return MappedPool(PoolView(path="", nbytes=plan.nbytes, tensors=plan.tensors), memory, writable=True)


def test_bytes_of_the_same_dtype_come_as_they_are_in_file_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.bytes(24), rng.bytes(10)
    tensors = {"model.embed": ("BF16", (4, 3), a), "norm": ("BF16", (5,), b), "empty": ("BF16", (0, 2), b"")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    pool = load(tmp_path)
    assert set(pool.names) == {"model.embed", "norm", "empty"}
    assert pool.raw("model.embed").tobytes() == a
    assert pool.array("norm").shape == (5,)
    assert pool.raw("norm").tobytes() == b
    assert "lm_head.weight" not in pool.names


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m-1.safetensors", {"a": ("BF16", (2,), b"abcd")})
    write_safetensors(tmp_path / "m-2.safetensors", {"b": ("BF16", (1,), b"ef")})
    write_safetensors(tmp_path / "stray.safetensors", {"c": ("BF16", (1,), b"gh")})
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    pool = load(tmp_path)
    assert pool.names == ("a", "b")
    assert pool.raw("b").tobytes() == b"ef"


@pytest.mark.parametrize(("code", "numpy_name"), [("F32", "float32"), ("F16", "float16"), ("F64", "float64")])
def test_other_floats_are_converted_as_torch_does(tmp_path: Path, code: str, numpy_name: str) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=(33, 7)).astype(numpy_name)
    values[0, :3] = [np.inf, -0.0, np.nan]
    write_safetensors(tmp_path / "model.safetensors", {"w": (code, (33, 7), values.tobytes())})
    expected = torch.from_numpy(values).to(torch.bfloat16)
    pool = load(tmp_path)
    assert pool.tensor("w").dtype == "bfloat16"
    assert torch.equal(pool.torch("w").view(torch.int16), expected.view(torch.int16))


def test_conversion_in_pieces_is_seamless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("shared.weights.seed._CHUNK_ELEMENTS", 10)
    values = np.arange(37, dtype=np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", (37,), values.tobytes())})
    assert torch.equal(load(tmp_path).torch("w"), torch.from_numpy(values).to(torch.bfloat16))


def test_integers_and_quantised_tensors_keep_their_type(tmp_path: Path) -> None:
    ids = np.arange(4, dtype=np.int64)
    tensors = {"ids": ("I64", (4,), ids.tobytes()), "q": ("F8_E4M3", (3,), b"xyz")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    pool = load(tmp_path)
    assert np.array_equal(pool.array("ids"), ids)
    assert pool.raw("q").tobytes() == b"xyz"


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    saved = {f"t{i}": torch.randn(i + 1, 3).to(torch.bfloat16) for i in range(5)}
    save_file(saved, str(tmp_path / "model.safetensors"))
    pool = load(tmp_path)
    assert all(torch.equal(pool.torch(name), tensor) for name, tensor in saved.items())


def test_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        plan_seed(tmp_path, "bfloat16")
    with pytest.raises(ConfigError, match="is not a folder"):
        plan_seed(tmp_path / "nowhere", "bfloat16")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "header of 0 bytes|tensors|cannot be read"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of"),
        ((2).to_bytes(8, "little") + b"{]", "cannot be read as safetensors"),
        ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
        ((2).to_bytes(8, "little") + b"[]", "cannot be read as safetensors"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        plan_seed(tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 6]}, "tensor w of 4 bytes"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]}, "of a file of"),
        ({"dtype": "Q4", "shape": [2], "data_offsets": [0, 4]}, "cannot be understood"),
        ({"dtype": "BF16", "data_offsets": [0, 4]}, "cannot be understood"),
    ],
)
def test_broken_entry_is_named(tmp_path: Path, entry: dict[str, Any], match: str) -> None:
    text = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
    with pytest.raises(ConfigError, match=match):
        plan_seed(tmp_path, "bfloat16")


def test_index_that_leaves_the_folder_or_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ConfigError, match="outside its folder"):
        plan_seed(tmp_path, "bfloat16")
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"missing: x\.safetensors"):
        plan_seed(tmp_path, "bfloat16")
    index.write_text("{}")
    with pytest.raises(ConfigError, match="is not an index"):
        plan_seed(tmp_path, "bfloat16")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"w": ("BF16", (1,), b"xy")})
    with pytest.raises(ConfigError, match=r"also in a\.safetensors"):
        plan_seed(tmp_path, "bfloat16")
