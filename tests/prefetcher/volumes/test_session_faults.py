"""Commits and reloads while what they need fails: the worker has an answer at once, and can go on afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleetstart.prefetcher.volumes.store_version import store_version
from fleetstart.prefetcher.volumes.store_writer import FolderWriter
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.sdk.volumes import VolumeError
from tests.prefetcher.volumes.bench import Bench, contents, run, write
from tests.servers import RedisServer, wait_until

ANSWERED_S = 10.0


def test_without_redis_commits_and_reloads_are_refused_and_with_it_they_go_on(
    folder_bench: Bench, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with folder_bench.worker() as one, asyncio.timeout(ANSWERED_S * 3):
            redis_server.kill()
            with pytest.raises(VolumeError, match="Redis does not answer"):
                await asyncio.to_thread(write, one, {"a": b"1"})
            with pytest.raises(VolumeError, match="Redis does not answer"):
                await asyncio.to_thread(one.reload)
            assert (one.version, contents(one.path)) == (0, {})
            redis_server.start()
            assert await asyncio.to_thread(write, one, {"a": b"1"}) == 1
            assert await asyncio.to_thread(one.reload) == 1

    run(folder_bench, scenario)
    assert [one.number for one in folder_bench.record.versions] == [1]
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")


def test_a_session_that_fails_ends_its_stream(folder_bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A record that nobody can read, such as one of a later release, is no error that a worker is told."""

    async def scenario() -> None:
        async with folder_bench.worker() as one, asyncio.timeout(ANSWERED_S):
            folder_bench.client.hset(keys.VOLUMES, "index", b"{")
            with pytest.raises(VolumeError, match="the node no longer answers"):
                await asyncio.to_thread(write, one, {"a": b"1"})
            with pytest.raises(VolumeError, match="the node no longer answers"):
                await asyncio.to_thread(one.reload)

    run(folder_bench, scenario)
    assert "the stream of a worker's volumes failed" in caplog.text
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")


def test_a_version_that_its_node_cannot_keep_is_no_base_of_the_next_one(
    folder_bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = tmp_path / "same"
    same.mkdir()
    (same / "a").write_bytes(b"1")
    tree = store_version(FolderWriter(tmp_path / "elsewhere"), same, None, lambda: False).tree
    (folder_bench.folder / tree).write_bytes(b"in its place")

    async def scenario() -> None:
        async with folder_bench.worker() as one, asyncio.timeout(ANSWERED_S):
            assert await asyncio.to_thread(write, one, {"a": b"1"}) == 1
            assert not folder_bench.cache.has(tree)
            assert await asyncio.to_thread(write, one, {"a": b"1"}) == 1, "the same files are no version"
            assert await asyncio.to_thread(write, one, {"b": b"2"}) == 2

    run(folder_bench, scenario)
    assert "a new volume is not kept" in caplog.text
    assert [one.number for one in folder_bench.record.versions] == [1, 2]
    wait_until(lambda: not folder_bench.staged(), what="an empty staging")
