"""The audit log beyond what Redis keeps: lines go to the object store, and are read over both as if it were one."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis

from fleetstart.controller.auth.audit_log import FOLDER, SEGMENT_MAX_BYTES, STREAM_ROWS, AuditLog
from fleetstart.controller.schemas.access import AuditEvent
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import TooLarge
from tests.controller.conftest import ControllerProcess
from tests.servers import RedisServer, wait_until


def event(number: int, unix_ms: int) -> AuditEvent:
    return AuditEvent(unix_ms=unix_ms, by=f"key-{number % 2}", verb="secret.set", object=f"secret {number}", status=200)


def on_a_log(
    redis_url: str, tmp_path: Path, test: Callable[[AuditLog, redis.Redis, FolderStore], Awaitable[None]]
) -> None:
    async def run() -> None:
        client, store = connect(redis_url), FolderStore(tmp_path / "store")
        try:
            await test(AuditLog(client, store, lambda: 1), client, store)
        finally:
            await client.aclose()

    asyncio.run(run())


async def fill(client: redis.Redis, count: int, *, of_one_ms: int = 1) -> None:
    """With as many lines in each millisecond, from the 1000th on."""
    async with client.pipeline(transaction=False) as pipe:
        for number in range(count):
            unix_ms = 1000 + number // of_one_ms
            entry = f"{unix_ms}-{number % of_one_ms}"
            pipe.xadd(keys.AUDIT, {"event": msgspec.json.encode(event(number, unix_ms))}, id=entry)
        await pipe.execute()


def numbers(events: list[AuditEvent]) -> list[int]:
    return [int(one.object.removeprefix("secret ")) for one in events]


@pytest.mark.parametrize("of_one_ms", [1, 4, 100])
def test_what_was_archived_is_read_as_if_it_had_not_been(redis_url: str, tmp_path: Path, of_one_ms: int) -> None:
    async def test(log: AuditLog, client: redis.Redis, store: FolderStore) -> None:
        await fill(client, 50, of_one_ms=of_one_ms)
        before = await log.read(0, "", 1000)
        assert numbers(before) == list(range(49, -1, -1))
        await log.archive(rows=7, segment_rows=6)
        assert int(await client.xlen(keys.AUDIT)) <= 7
        assert len(await store.list(FOLDER)) == 8
        assert await log.read(0, "", 1000) == before
        assert numbers(await log.read(0, "key-1", 5)) == [49, 47, 45, 43, 41]
        for since_unix_ms in (0, 1000, 1003, 1049, 2000):
            expected = [one for one in before if one.unix_ms >= since_unix_ms]
            assert await log.read(since_unix_ms, "", 1000) == expected, since_unix_ms

    on_a_log(redis_url, tmp_path, test)


def test_a_controller_that_dies_between_store_and_redis_leaves_every_line_once(redis_url: str, tmp_path: Path) -> None:
    async def test(log: AuditLog, client: redis.Redis, store: FolderStore) -> None:
        await fill(client, 30, of_one_ms=3)
        before, stream = await log.read(0, "", 1000), await client.dump(keys.AUDIT)
        await log.archive(rows=10, segment_rows=8)
        archived: Any = stream
        await client.restore(keys.AUDIT, 0, archived, replace=True)  # as if nothing had been taken out of it
        assert await log.read(0, "", 1000) == before
        await log.archive(rows=20, segment_rows=10)  # cut otherwise, as another release may
        assert await log.read(0, "", 1000) == before
        await log.archive(rows=0, segment_rows=10)
        assert await log.read(0, "", 1000) == before

    on_a_log(redis_url, tmp_path, test)


def test_an_object_that_is_larger_than_any_of_ours_is_refused(redis_url: str, tmp_path: Path) -> None:
    async def test(log: AuditLog, client: redis.Redis, store: FolderStore) -> None:
        await store.create(f"{FOLDER}{1000:016d}-0-1.z", zlib.compress(b"\0" * (SEGMENT_MAX_BYTES + 1)))
        with pytest.raises(TooLarge):
            await log.read(0, "", 10)

    on_a_log(redis_url, tmp_path, test)


def test_a_controller_archives_by_itself_and_reads_over_both(
    controller: ControllerProcess, redis_server: RedisServer
) -> None:
    assert controller.http.put("/api/v1/projects/ml", json={}).status_code == 200
    with redis_server.client() as client:
        first = controller.http.get("/api/v1/audit").json()
        assert [one["verb"] for one in first] == ["project.set"]
        pipe = client.pipeline(transaction=False)
        for number in range(STREAM_ROWS):
            pipe.xadd(keys.AUDIT, {"event": msgspec.json.encode(event(number, 1000))})
        pipe.execute()
        wait_until(lambda: client.xlen(keys.AUDIT) <= STREAM_ROWS, 20, what="the archive")
    found = controller.http.get("/api/v1/audit", params={"by": "local", "limit": 1}).json()
    assert found == first, "the oldest line lies in the store by now"


def test_a_name_that_is_endless_does_not_make_an_endless_line(controller: ControllerProcess) -> None:
    assert controller.http.delete("/api/v1/functions/" + "n" * 20_000).status_code == 404
    (line,) = controller.http.get("/api/v1/audit").json()
    assert line["object"].startswith("function nnn")
    assert len(line["object"]) <= 200
