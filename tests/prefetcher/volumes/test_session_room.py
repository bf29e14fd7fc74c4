"""The room that a worker's versions take on its node: the one it was started with, and its next commit's base."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.prefetcher.volumes.store_writer import FolderWriter
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.function.volume import MountedVolume
from tests.prefetcher.nodes import Store
from tests.prefetcher.volumes.bench import ONE, TWO, Bench, contents, run, write
from tests.servers import RedisServer

SIZE_BYTES = 100_000


@pytest.fixture
def small_bench(store: Store, redis_server: RedisServer, tmp_path: Path) -> Bench:
    """Room for what a worker has mounted, for its base, for a commit under way, and for one more."""
    writer = FolderWriter(store.folder)
    return Bench(FolderSource(store.folder), writer, redis_server, tmp_path, budget_bytes=4 * SIZE_BYTES)


def state(number: int) -> dict[str, bytes | None]:
    return {"state": bytes([number]) * SIZE_BYTES}


def test_a_worker_commits_more_versions_than_its_node_has_room_for(small_bench: Bench) -> None:
    async def scenario() -> None:
        async with small_bench.worker() as one:
            for number in range(1, 9):
                assert await asyncio.to_thread(write, one, state(number)) == number
            assert small_bench.cache.has(small_bench.record.versions[-1].tree), "the base of the next commit"
            assert small_bench.cache.used_bytes <= 4 * SIZE_BYTES

    run(small_bench, scenario)


def test_a_worker_reloads_more_versions_than_its_node_has_room_for(small_bench: Bench) -> None:
    async def scenario() -> None:
        async with small_bench.worker(ONE) as one:
            async with small_bench.worker(TWO) as two:
                for number in range(1, 9):
                    assert await asyncio.to_thread(write, two, state(number)) == number
                    assert await asyncio.to_thread(one.reload) == number
            assert await asyncio.to_thread(write, one, state(9)) == 9

    run(small_bench, scenario)


def test_the_version_that_a_worker_has_mounted_stays_though_it_was_a_base_in_between(small_bench: Bench) -> None:
    async def scenario() -> None:
        async with small_bench.worker(ONE) as one:
            assert await asyncio.to_thread(write, one, state(1)) == 1
        async with small_bench.worker(TWO) as two:
            mounted = two.path
            for number, content in enumerate([2, 1, 3], 2):
                assert await asyncio.to_thread(write, two, state(content)) == number
            with pytest.raises(Unavailable):  # it is in use, and so is the base of the next commit
                await small_bench.evict_for(3 * SIZE_BYTES)
        await small_bench.evict_for(3 * SIZE_BYTES)
        with pytest.raises(Unavailable):  # the end of its session is not the end of the worker
            await small_bench.evict_for(4 * SIZE_BYTES)
        assert contents(mounted) == state(1)

    run(small_bench, scenario)


def test_a_version_that_is_mounted_for_another_volume_stays(small_bench: Bench) -> None:
    """Two volumes with the same files have the same tree."""

    async def scenario() -> None:
        async with small_bench.worker(ONE) as one:
            assert await asyncio.to_thread(write, one, state(1)) == 1
            tree = small_bench.record.versions[-1].tree
            folder = await small_bench.cache.acquire(tree, TWO)
            assert await asyncio.to_thread(write, one, state(2)) == 2
        other = MountedVolume(name="other", number=1, tree=tree, folder=folder)
        async with small_bench.worker(TWO, beside=[other]) as two:
            assert await asyncio.to_thread(write, two, state(1)) == 3
            assert await asyncio.to_thread(write, two, state(3)) == 4
            with pytest.raises(Unavailable):  # two are mounted, and one is the base of the next commit
                await small_bench.evict_for(2 * SIZE_BYTES)
            assert contents(Path(folder)) == state(1)

    run(small_bench, scenario)


def test_what_a_session_kept_leaves_once_it_has_ended(small_bench: Bench) -> None:
    async def scenario() -> None:
        async with small_bench.worker() as one:
            assert await asyncio.to_thread(write, one, state(1)) == 1
            with pytest.raises(Unavailable):
                await small_bench.evict_for(4 * SIZE_BYTES)
        await small_bench.evict_for(4 * SIZE_BYTES)

    run(small_bench, scenario)
