"""Quotas of the object store, and what becomes of old versions: bounded for each project and each function."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.registry import registry as registry_module
from fleetstart.controller.registry.registry import Registry, prunable
from fleetstart.controller.state import traffic
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version
from tests.controller.auth.test_keys import anybody, bearer, error, lock, make
from tests.controller.conftest import BUNDLE, BUNDLE_ID, ControllerProcess
from tests.controller.registry.test_uploads import ID, MANIFEST, NAMES, PARTS

NOW_MS = 1_800_000_000_000


def key_of(data: bytes) -> str:
    return f"/api/v1/objects/parts/{hashlib.sha256(data).hexdigest()}"


def test_a_project_has_a_quota_of_bytes_and_objects_in_the_store(controller: ControllerProcess) -> None:
    for name in ("ml", "web"):
        assert controller.http.put(f"/api/v1/projects/{name}", json={}).status_code == 200
    quotas = {"quotas": {"store_bytes": 10_000, "objects": 4}}
    assert controller.http.put("/api/v1/projects/ml", json=quotas).status_code == 200
    lock(controller)
    ml = make(controller, "ml", ["deploy"], project="ml")
    web = make(controller, "web", ["deploy"], project="web")
    large, small = b"l" * 9_000, [bytes([number]) * 100 for number in range(9)]
    with anybody(controller) as client:

        def put(data: bytes, key: str = ml, **headers: str) -> int:
            return client.put(key_of(data), content=data, headers={**bearer(key), **headers}).status_code

        assert put(large) == 201
        assert put(large) == 200, "what is there already is not counted twice"
        refused = client.put(key_of(b"m" * 2_000), content=b"m" * 2_000, headers=bearer(ml))
        assert (refused.status_code, error(refused)["code"]) == (403, "quota_exceeded")
        assert "fs project quota ml --store" in error(refused)["hint"]
        undeclared = client.put(key_of(b"x"), content=iter([b"x"]), headers=bearer(ml))
        assert (undeclared.status_code, error(undeclared)["code"]) == (400, "invalid_input")
        assert client.put(key_of(b"a"), content=b"b", headers=bearer(ml)).status_code == 400, "not what it says"
        with ThreadPoolExecutor(len(small)) as pool:
            assert sorted(pool.map(put, small)) == [201] * 3 + [403] * 6, "not passed together either"
        assert put(b"w" * 20_000, web) == 201, "another project has none"


def test_what_is_deleted_makes_room(controller: ControllerProcess, tmp_path: Path) -> None:
    quotas = {"quotas": {"objects": 1}}
    assert controller.http.put("/api/v1/projects/ml", json=quotas).status_code == 200
    owner = lock(controller)
    ml = make(controller, "ml", ["deploy"], project="ml")
    part = f"/api/v1/objects/checkpoints/{ID}/{NAMES[0]}"
    with anybody(controller) as client:
        refused = client.post("/api/v1/uploads", content=MANIFEST, headers=bearer(ml))
        assert (refused.status_code, error(refused)["code"]) == (403, "quota_exceeded"), "it has three objects"
        quotas = {"quotas": {"objects": 3}}
        client.put("/api/v1/projects/ml", json=quotas, headers=bearer(owner)).raise_for_status()
        client.post("/api/v1/uploads", content=MANIFEST, headers=bearer(ml)).raise_for_status()
        assert client.put(part, content=PARTS[0], headers=bearer(ml)).status_code == 201
        assert client.put(key_of(b"x"), content=b"x", headers=bearer(ml)).status_code == 403
        removed = client.delete(f"/api/v1/checkpoints/{ID}", headers=bearer(owner))
        assert removed.status_code == 200, removed.text
        assert client.put(key_of(b"x"), content=b"x", headers=bearer(ml)).status_code == 201


def test_equal_weights_from_other_shards_keep_the_first_layout(controller: ControllerProcess) -> None:
    place = f"/api/v1/objects/checkpoints/{'b' * 64}/layout.json.gz"
    assert controller.http.put(place, content=b"one").status_code == 201
    assert controller.http.put(place, content=b"other").status_code == 200
    assert controller.http.get(place).content == b"one"


@given(
    st.dictionaries(st.integers(1, 50).map(Version), st.integers(1, 3 << 20), max_size=30),
    st.sets(st.integers(1, 50).map(Version), max_size=5),
)
def test_versions_in_service_stay_and_the_newest_others(sizes: dict[Version, int], tracked: set[Version]) -> None:
    old = prunable(sizes, tracked)
    assert not tracked & set(old)
    left = sizes.keys() - set(old)
    if old:
        assert max(old) < max(left, default=51) or left <= tracked
    over = sum(sizes[version] for version in left) > registry_module.VERSION_BYTES_KEPT
    assert not over or left <= tracked, "nothing more can be removed"
    assert all(version in tracked for version in left if version < max(old, default=0))


def test_a_deploy_removes_versions_that_are_too_many(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "VERSIONS_KEPT", 3)
    monkeypatch.setattr(traffic, "PAST_KEPT", 1)
    name = FunctionName("f")

    async def scenario() -> None:
        client, store = connect(redis_url), FolderStore(tmp_path)
        registry = Registry(StateSync(client, View()), store)
        await store.create(f"bundles/{BUNDLE_ID}", BUNDLE)
        await client.hset(keys.failures(name, Version(1)), "count", 1)
        for number in range(6):
            spec = FunctionSpec(name=name, bundle=BundleId(BUNDLE_ID), entry="a:b", env={"N": str(number)})
            await registry.deploy(spec, NOW_MS)
        assert [record.version for record in await registry.versions(name)] == [6, 5, 4]
        assert not await client.exists(keys.failures(name, Version(1)))
        assert await store.size(f"bundles/{BUNDLE_ID}") is not None, "others need it"
        await client.aclose()

    asyncio.run(scenario())
