"""Calls that cannot be carried out: each is a 4xx that names field and remedy, and changes nothing."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.gps import WriteRequest
from tests.support.gps_cluster import MODEL_BYTES, SHAPES, columns
from tests.support.memory_cluster import MemoryCluster, memory_cluster

READ = {"model": "policy", "receiver": "known"}
WHOLE = [{"tensor": name, "start": [0] * len(shape), "shape": shape} for name, shape in SHAPES.items()]
WRITE = {"model": "policy", "version": 1, "writer": "a", "writers": ["a"], "boxes": WHOLE}
W = "layers.0.down_proj.weight"

Call = tuple[str, str, dict[str, Any]]
BAD: dict[str, tuple[Call, int, str]] = {
    "read of an unknown model": (("POST", "/v1/read", {**READ, "model": "other"}), 404, "model"),
    "write of an unknown model": (("POST", "/v1/writes", {**WRITE, "model": "other"}), 404, "model"),
    "write of a frozen model": (("POST", "/v1/writes", {**WRITE, "model": "genrm"}), 409, "model"),
    "unknown tensor": (
        ("POST", "/v1/read", {**READ, "boxes": [{"tensor": "x", "start": [0], "shape": [1]}]}),
        400,
        "boxes[0].tensor",
    ),
    "box outside its tensor": (
        ("POST", "/v1/read", {**READ, "boxes": [{"tensor": W, "start": [700, 0], "shape": [100, 192]}]}),
        400,
        "boxes[0].shape",
    ),
    "box of another rank": (
        ("POST", "/v1/read", {**READ, "boxes": [{"tensor": W, "start": [0], "shape": [10]}]}),
        400,
        "boxes[0].shape",
    ),
    "range outside its tensor": (
        ("POST", "/v1/read", {**READ, "boxes": [{"tensor": W, "flat_start": 768 * 192, "flat_count": 1}]}),
        400,
        "boxes[0].flat_start",
    ),
    "other dtype": (
        (
            "POST",
            "/v1/writes",
            {**WRITE, "boxes": [{"tensor": W, "start": [0, 0], "shape": [768, 192], "dtype": "float32"}]},
        ),
        400,
        "boxes[0].dtype",
    ),
    "parallelism that leaves a hole": (
        ("POST", "/v1/writes", {**WRITE, "boxes": [b.model_dump() for b in columns(0, 2)]}),
        400,
        "boxes",
    ),
    "parallelism that overlaps": (
        ("POST", "/v1/writes", {**WRITE, "boxes": WHOLE + WHOLE[:1]}),
        400,
        "boxes",
    ),
    "writer twice": (("POST", "/v1/writes", {**WRITE, "writers": ["a", "a"]}), 400, "writers"),
    "writer that is none of the writers": (("POST", "/v1/writes", {**WRITE, "writer": "z"}), 400, "writer"),
    "stale version written": (("POST", "/v1/writes", {**WRITE, "version": 0}), 409, "version"),
    "version that nobody wrote": (("POST", "/v1/read", {**READ, "min_version": 9}), 409, "min_version"),
    "lease for ever": (("POST", "/v1/read", {**READ, "lease_s": 1e9}), 400, "lease_s"),
    "receiver that is not registered": (("POST", "/v1/read", {**READ, "receiver": "other"}), 400, "receiver"),
    "receiver that is no name": (("PUT", "/v1/receivers/a%20b", {"model": "policy"}), 400, "receiver"),
    "receiver to remove that is not there": (("DELETE", "/v1/receivers/other", {}), 404, "receiver"),
    "commit of an unknown Write": (
        ("POST", "/v1/writes/nothing/commit", {"writer": "a", "checksums": []}),
        404,
        "write_id",
    ),
    "commit by a stranger": (
        ("POST", "/v1/writes/OPEN/commit", {"writer": "z", "checksums": []}),
        400,
        "writer",
    ),
    "commit by a writer that did not begin": (
        ("POST", "/v1/writes/OPEN/commit", {"writer": "b", "checksums": []}),
        409,
        "writer",
    ),
    "commit with too few checksums": (
        ("POST", "/v1/writes/OPEN/commit", {"writer": "a", "checksums": ["0"]}),
        400,
        "checksums",
    ),
    "commit with a wrong checksum": (
        ("POST", "/v1/writes/OPEN/commit", {"writer": "a", "checksums": ["0"] * len(SHAPES)}),
        400,
        "checksums[0]",
    ),
    "release of no lease": (("DELETE", "/v1/read/nothing", {}), 404, "lease_id"),
    "path outside the run folder": (
        ("POST", "/v1/models/policy/load", {"path": "../model"}),
        400,
        "path",
    ),
    "absolute path": (("POST", "/v1/models/policy/load", {"path": "/etc"}), 400, "path"),
    "folder that is no checkpoint": (("POST", "/v1/models/policy/load", {"path": "logs"}), 400, "path"),
    "no such plan": (("GET", "/v1/transfer-plans/nothing", {}), 404, "plan_id"),
    "field that is missing": (("POST", "/v1/read", {"model": "policy"}), 422, "receiver"),
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MemoryCluster]:
    async with memory_cluster(tmp_path, 2, node_bytes=2 * MODEL_BYTES) as made:
        yield made


async def state(cluster: MemoryCluster) -> list[Any]:
    """What a bad call must not change."""
    found: list[Any] = []
    for node, http in cluster.http.items():
        found.append((await http.get("/v1/models")).json())
        found.append(cluster.services[node].receivers.num)
        found.append(sorted(cluster.services[node].holder.store.pool.folder.glob("pivotrl-mem*")))
        found.append(
            {name: (s.write_id, s.checksum) for name, s in cluster.services[node].holder.open.items()}
        )
    return found


async def test_bad_calls_name_field_and_remedy_and_change_nothing(cluster: MemoryCluster) -> None:
    http = cluster.http[1]
    assert (await http.put("/v1/receivers/known", json={"model": "policy"})).status_code == 200
    request = WriteRequest(model="policy", version=1, writer="a", writers=("a", "b"), boxes=columns(0, 1))
    opened = await cluster.clients[1].begin_write(request)
    for name, ((method, path, body), status, field) in BAD.items():
        before = await state(cluster)
        path = path.replace("OPEN", opened.write_id)
        answer = await http.request(method, path, json=body or None)
        wire = answer.json()
        assert answer.status_code == status, f"{name}: {answer.text}"
        assert wire["code"] != "internal", name
        assert wire["data"].get("field") == field, f"{name}: {wire}"
        if status != 422:
            assert wire["data"].get("remedy"), f"{name}: {wire}"
            assert wire["data"]["remedy"].rstrip(".") in wire["message"], f"{name}: {wire}"
        assert await state(cluster) == before, name
