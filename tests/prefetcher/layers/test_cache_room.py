"""The room of layers: what a worker has taken stays, and layers that come at a time share no room."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from fleetstart.prefetcher.layers.cache import LayerCache
from fleetstart.prefetcher.layers.cache_room import RESERVE_BYTES, ComingTree, free_bytes
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import LayerId, WorkerId
from tests.prefetcher.layer_store import put_layer
from tests.prefetcher.nodes import Store

SIZE_BYTES = 10_000
ONE, TWO, THREE = WorkerId("w-1"), WorkerId("w-2"), WorkerId("w-3")


def put(store: Store, number: int, size_bytes: int = SIZE_BYTES) -> LayerId:
    return put_layer(store, {f"m{number}.py": bytes([number]) * size_bytes})


async def cache_with(store: Store, folder: Path, layers: list[LayerId], budget_bytes: int) -> LayerCache:
    """A cache that has the layers, which nobody uses."""
    cache = LayerCache(folder=folder / "layers", source=FolderSource(store.folder), budget_bytes=budget_bytes)
    for layer in layers:
        await cache.acquire(layer, ONE)
        cache.release(layer, ONE)
    return cache


def test_a_layer_that_a_worker_takes_while_others_leave_stays(store: Store, tmp_path: Path) -> None:
    layers = [put(store, number) for number in range(4)]
    large = put(store, 9, 3 * SIZE_BYTES)

    async def scenario() -> None:
        cache = await cache_with(store, tmp_path, layers, 4 * SIZE_BYTES)
        coming = asyncio.create_task(cache.acquire(large, TWO))
        while sum(map(cache.has, layers)) == len(layers):
            assert not coming.done()
            await asyncio.sleep(0)
        taken = {layer: Path(await cache.acquire(layer, THREE)) for layer in layers if cache.has(layer)}
        assert taken
        assert Path(await coming).is_dir()
        assert all(cache.has(layer) and folder.is_dir() for layer, folder in taken.items())
        assert cache.used_bytes == 4 * SIZE_BYTES

    asyncio.run(scenario())


def test_layers_that_come_at_a_time_each_evict_for_their_own_room(store: Store, tmp_path: Path) -> None:
    layers = [put(store, number) for number in range(4)]
    first, second = (put(store, number, 2 * SIZE_BYTES) for number in (8, 9))

    async def scenario() -> None:
        cache = await cache_with(store, tmp_path, layers, 4 * SIZE_BYTES)
        folders = await asyncio.gather(cache.acquire(first, ONE), cache.acquire(second, TWO))
        assert all(Path(folder).is_dir() for folder in folders)
        assert cache.used_bytes == 4 * SIZE_BYTES

    asyncio.run(scenario())
    assert {path.name for path in (tmp_path / "layers").iterdir()} == {first, second}


def test_layers_that_come_at_a_time_share_no_room(store: Store, tmp_path: Path) -> None:
    first, second = (put(store, number, 2 * SIZE_BYTES) for number in (8, 9))

    async def scenario() -> None:
        cache = await cache_with(store, tmp_path, [], 3 * SIZE_BYTES)
        came = await asyncio.gather(cache.acquire(first, ONE), cache.acquire(second, TWO), return_exceptions=True)
        assert {type(one) for one in came} == {str, Unavailable}
        assert cache.used_bytes == 2 * SIZE_BYTES

    asyncio.run(scenario())


def test_files_that_are_staged_at_a_time_share_no_room(store: Store, tmp_path: Path) -> None:
    layers = [put(store, number) for number in range(4)]

    async def scenario() -> None:
        cache = await cache_with(store, tmp_path, layers, 4 * SIZE_BYTES)
        staged = await asyncio.gather(*(cache.stage(3 * SIZE_BYTES) for _ in range(2)), return_exceptions=True)
        (folder,) = (one for one in staged if isinstance(one, Path))
        assert sum(isinstance(one, Unavailable) for one in staged) == 1
        assert cache.used_bytes <= 4 * SIZE_BYTES
        await cache.unstage(folder)
        assert cache.used_bytes <= SIZE_BYTES
        assert not folder.exists()

    asyncio.run(scenario())


def test_staged_files_that_are_written_do_not_count_twice_on_the_disk(store: Store, tmp_path: Path) -> None:
    async def scenario() -> None:
        cache = await cache_with(store, tmp_path, [], 1 << 62)
        most_bytes = shutil.disk_usage(tmp_path).free * 6 // 10
        first = await cache.stage(most_bytes)
        with pytest.raises(Unavailable):
            await cache.stage(most_bytes)
        cache.received(first)
        second = await cache.stage(most_bytes)
        for staging in (first, second):
            await cache.unstage(staging)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("disk_free", "coming", "free"),
    [
        (RESERVE_BYTES + 900, [], 100),
        (RESERVE_BYTES + 50, [], 50),
        (RESERVE_BYTES - 50, [], -50),
        (RESERVE_BYTES + 900, [ComingTree(860)], 40),
        (RESERVE_BYTES + 900, [ComingTree(500, written_bytes=60), ComingTree(400)], 60),
        (RESERVE_BYTES + 900, [ComingTree(900, written_bytes=900)], 100),
    ],
)
def test_what_is_still_to_be_written_is_not_free_on_the_disk(
    disk_free: int, coming: list[ComingTree], free: int
) -> None:
    assert free_bytes(budget_bytes=1000, used_bytes=900, disk_free_bytes=disk_free, coming=coming) == free
