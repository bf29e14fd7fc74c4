"""Commits and reloads while what they need fails: the worker has an answer at once, and can go on afterwards."""

from __future__ import annotations

import asyncio

import pytest

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
