"""Deploys, removals and sweeps at once: no function loses its weights, and nobody waits for who has died."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.registry.checkpoints import UNFINISHED_S, Checkpoints
from fleetstart.controller.registry.deletion_guard import FORGET_MS, STALE_MS, DeletionGuard
from fleetstart.controller.registry.registry import Registry, WeightNeeds
from fleetstart.controller.registry.store_accounts import StoreAccounts
from fleetstart.controller.registry.uploads import Uploads
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.controller.storage.object_store import StoredObject, Upload
from fleetstart.runtime.contract.errors import FleetError, NotFound, Refused, Unavailable, WeightsMissing
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName
from fleetstart.runtime.contract.weights.manifest import checkpoint_id, manifest_bytes
from tests.controller.conftest import BUNDLE, BUNDLE_ID
from tests.controller.manifests import NOW_MS, PART, manifest, objects_of


class Gate(FolderStore):
    """A folder that stops, when it is told to, before it lists: in the middle of a removal."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached = asyncio.Event()
        self.passed = asyncio.Event()
        self.passed.set()

    async def list(self, prefix: str) -> list[StoredObject]:
        self.reached.set()
        await self.passed.wait()
        return await super().list(prefix)


class Room:
    """A registry and the checkpoints, over a real Redis and a folder."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.client = connect(redis_url)
        self.store = Gate(folder)
        self.registry = Registry(StateSync(self.client, View()), self.store)
        self.uploads = Uploads(self.client, self.store, StoreAccounts(self.client))
        self.checkpoints = Checkpoints(self.store, self.registry, self.uploads)

    async def put(self, key: str, data: bytes) -> None:
        async def chunks() -> AsyncGenerator[bytes, None]:
            yield data

        await self.store.put(key, Upload(key, chunks()))

    async def push(self, data: bytes) -> CheckpointId:
        await self.put(f"bundles/{BUNDLE_ID}", BUNDLE)
        for key, content in objects_of(data).items():
            await self.put(key, content)
        return checkpoint_id(data)

    async def deploy(self, name: str, weights: CheckpointId) -> None:
        spec = FunctionSpec(name=FunctionName(name), bundle=BundleId(BUNDLE_ID), entry="handler:run", weights=weights)
        await self.registry.deploy(spec, NOW_MS)


def test_a_deploy_in_the_middle_of_a_removal_is_told_to_wait(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        room.store.passed.clear()
        removal = asyncio.create_task(room.checkpoints.remove(checkpoint, NOW_MS))
        await room.store.reached.wait()
        with pytest.raises(Unavailable, match="being removed"):
            await room.deploy("f", checkpoint)
        room.store.passed.set()
        await removal
        with pytest.raises(WeightsMissing):
            await room.deploy("f", checkpoint)
        await room.push(manifest_bytes(manifest()))
        await room.deploy("f", checkpoint)
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_removal_behind_the_back_of_a_deploy_makes_it_look_again(redis_url: str, tmp_path: Path) -> None:
    """The deploy has seen its weights in the store, and is about to write its record."""

    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        require = room.registry._require_weights

        async def then_removed(spec: FunctionSpec) -> WeightNeeds:
            found = await require(spec)
            await room.checkpoints.remove(checkpoint, NOW_MS)
            return found

        room.registry._require_weights = then_removed  # type: ignore[method-assign]
        with pytest.raises(WeightsMissing):
            await room.deploy("f", checkpoint)
        assert await room.registry.uses() == {}
        await room.client.aclose()

    asyncio.run(scenario())


def test_deploys_and_removals_at_once_never_leave_a_function_without_weights(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        outcomes: set[str] = set()

        async def attempt(work: Any, turns_late: int) -> None:
            for _ in range(turns_late):
                await asyncio.sleep(0)
            try:
                await work
                outcomes.add("done")
            except FleetError as error:
                outcomes.add(error.code)

        for turn in range(30):
            checkpoint = await room.push(manifest_bytes(manifest()))
            deploy = attempt(room.deploy(f"f{turn}", checkpoint), 0)
            removals = [attempt(room.checkpoints.remove(checkpoint, NOW_MS), late) for late in (10 * turn, 20 * turn)]
            await asyncio.gather(deploy, *removals)
            whole = (tmp_path / "checkpoints" / checkpoint / "manifest.json").exists()
            assert whole == (checkpoint in await room.registry.uses())
            with contextlib.suppress(NotFound):
                await room.registry.delete(FunctionName(f"f{turn}"), NOW_MS)
        assert "done" in outcomes
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_sweep_takes_what_was_left_a_day_ago_and_nothing_else(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        await room.put(f"checkpoints/{'a' * 64}/part-0", PART)
        await room.put(f"layers/{'b' * 64}/part-00000", PART)
        now_ms = time.time_ns() // 1_000_000
        assert await room.checkpoints.sweep(now_ms) == 0
        assert await room.checkpoints.sweep(now_ms + round(UNFINISHED_S * 1000) + 1000) == 2
        assert [info.id for info in await room.checkpoints.list(unfinished=True)] == [checkpoint]
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_removal_that_died_stands_in_nobodys_way_for_long(redis_url: str) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        removals, checkpoint = DeletionGuard(client), CheckpointId("a" * 64)
        await removals.begin(checkpoint, NOW_MS)
        with pytest.raises(Unavailable):
            await removals.marks([checkpoint], NOW_MS + STALE_MS - 1)
        (mark,) = await removals.marks([checkpoint], NOW_MS + STALE_MS)
        assert mark.startswith("removing:")
        token = await removals.begin(CheckpointId("b" * 64), NOW_MS + FORGET_MS + 1)
        assert await removals.marks([checkpoint], NOW_MS) == [""]
        await removals.begin(CheckpointId("b" * 64), NOW_MS + FORGET_MS + 2)
        await removals.end(CheckpointId("b" * 64), token)
        with pytest.raises(Unavailable):
            await removals.marks([CheckpointId("b" * 64)], NOW_MS + FORGET_MS + 3)
        await client.aclose()

    asyncio.run(scenario())


def test_a_refusal_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        await room.deploy("f", checkpoint)
        with pytest.raises(Refused, match="used by f@1"):
            await room.checkpoints.remove(checkpoint, NOW_MS)
        await room.deploy("g", checkpoint)
        with pytest.raises(NotFound):
            await room.checkpoints.remove(CheckpointId(hashlib.sha256().hexdigest()), NOW_MS)
        await room.client.aclose()

    asyncio.run(scenario())
