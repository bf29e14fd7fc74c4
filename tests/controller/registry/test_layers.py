"""Unused layers in the store: they stay for a time, leave then, and stay if somebody deploys at that moment."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.registry.layers import UNUSED_MS, LayerCollector
from fleetstart.controller.registry.registry import Registry
from fleetstart.controller.registry.unused_objects import changes
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.controller.storage.object_store import Upload
from fleetstart.runtime.contract.errors import LayerInvalid
from fleetstart.runtime.contract.function.layer import (
    LayerFile,
    LayerManifest,
    layer_bytes,
    layer_id,
    own_platform,
    own_python,
    parts_of,
)
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName, LayerId, Version
from tests.controller.conftest import BUNDLE, BUNDLE_ID
from tests.controller.manifests import NOW_MS

CONTENT = b"x = 1\n"


class Room:
    """A registry and the collector, over a real Redis and a folder."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.client = connect(redis_url)
        self.store = FolderStore(folder)
        self.registry = Registry(StateSync(self.client, View()), self.store)
        self.collector = LayerCollector(self.client, self.store, self.registry)

    async def put(self, key: str, data: bytes) -> None:
        async def chunks() -> AsyncGenerator[bytes, None]:
            yield data

        await self.store.put(key, Upload(key, chunks()))

    async def push(self, name: str) -> LayerId:
        manifest = LayerManifest(
            python=own_python(),
            platform=own_platform(),
            lock="",
            files=[LayerFile(f"{name}.py", len(CONTENT))],
            parts=parts_of(len(CONTENT)),
            chunks=[0],
            digests=[hashlib.sha256(CONTENT).hexdigest()],
        )
        data = layer_bytes(manifest)
        layer = layer_id(data)
        await self.put(f"bundles/{BUNDLE_ID}", BUNDLE)
        await self.put(f"layers/{layer}/part-00000", CONTENT)
        await self.put(f"layers/{layer}/manifest.json", data)
        return layer

    async def deploy(self, name: str, layer: LayerId) -> None:
        spec = FunctionSpec(name=FunctionName(name), bundle=BundleId(BUNDLE_ID), entry="handler:run", layer=layer)
        await self.registry.deploy(spec, NOW_MS)

    async def has(self, layer: LayerId) -> bool:
        return await self.store.size(f"layers/{layer}/manifest.json") is not None


def test_a_layer_leaves_a_while_after_its_last_function_and_a_used_one_stays(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        used, unused = await room.push("used"), await room.push("unused")
        await room.deploy("f", used)
        await room.deploy("g", unused)
        record = await room.registry.version(FunctionName("f"), Version(1))
        assert record.packages_bytes == len(CONTENT)
        assert record.packages_for == f"{own_python()} on {own_platform()}"
        assert await room.collector.collect(NOW_MS) == 0
        await room.registry.delete(FunctionName("g"), NOW_MS)
        later_ms = NOW_MS + 100 * UNUSED_MS
        assert await room.collector.collect(later_ms) == 0, "its time begins when it is seen to be unused"
        assert await room.collector.collect(later_ms + UNUSED_MS) == 0
        assert await room.collector.collect(later_ms + UNUSED_MS + 1) == 1
        assert (await room.has(used), await room.has(unused)) == (True, False)
        assert await room.store.list("layers/") != []
        with pytest.raises(LayerInvalid, match="not in the store"):
            await room.deploy("g", unused)
        await room.push("unused")
        await room.deploy("g", unused)
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_layer_that_is_needed_again_starts_its_time_anew(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        layer = await room.push("shared")
        await room.collector.collect(NOW_MS)
        await room.deploy("f", layer)
        await room.collector.collect(NOW_MS + 2 * UNUSED_MS)
        await room.registry.delete(FunctionName("f"), NOW_MS)
        assert await room.collector.collect(NOW_MS + 3 * UNUSED_MS) == 0
        assert await room.has(layer)
        await room.client.aclose()

    asyncio.run(scenario())


IDS = st.sampled_from([CheckpointId(letter * 64) for letter in "abcde"])


@given(st.sets(IDS), st.sets(IDS), st.dictionaries(IDS, st.integers(0, 3 * UNUSED_MS)), st.integers(0, 5 * UNUSED_MS))
def test_only_what_is_there_unused_and_noted_long_ago_is_removed(
    there: set[CheckpointId], used: set[CheckpointId], noted: dict[CheckpointId, int], now_ms: int
) -> None:
    fresh, forgotten, outdated = changes(there, used, noted, now_ms, UNUSED_MS)
    assert set(outdated) == {layer for layer in there - used if layer in noted and now_ms - noted[layer] > UNUSED_MS}
    assert set(fresh) == there - used - noted.keys()
    assert not set(forgotten) & (there - used)
