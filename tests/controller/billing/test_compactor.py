"""Compaction: whatever dies between which two steps, each row is in the ledger once, and the sum is the same."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetstart.controller.billing.archive_format import LedgerEntry
from fleetstart.controller.billing.archive_store import LedgerArchive, segment_key
from fleetstart.controller.billing.compactor import Compactor
from fleetstart.controller.billing.ledger_reader import LedgerReader
from fleetstart.controller.state.redis_client import REDIS_ERRORS, connect
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.controller.storage.object_store import ObjectStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import APPEND_KEYS, LedgerRow, append_args, append_script
from fleetstart.runtime.contract.errors import ChecksumMismatch, FleetError, NotFound, StoreFailed
from tests.controller.billing.rows import call, phase
from tests.servers import RedisServer

SEGMENT_ROWS = 4
NOW_MS = 10**15
"""Late enough that every row is old enough to be compacted."""
AHEAD_MS = 10**14
"""Rows of the future are never from before the horizon."""


class World:
    """One ledger: a real Redis, a real store, and whoever compacts at the moment."""

    def __init__(self, url: str, store: ObjectStore, *, ids_kept_ms: int = 0) -> None:
        self.client = connect(url)
        self.store = store
        self._ids_kept_ms = ids_kept_ms
        self.successor()

    def successor(self) -> None:
        """Another process takes over: it knows nothing."""
        archive = LedgerArchive(self.store)
        self.reader = LedgerReader(self.client, archive)
        self.compactor = Compactor(
            self.client,
            archive,
            self.reader,
            lambda: 1,
            segment_rows=SEGMENT_ROWS,
            segment_age_ms=0,
            ids_kept_ms=self._ids_kept_ms,
        )

    async def sync_always(self) -> None:
        """Has Redis sync its log with each write, until it is started again: no answered write is lost in a kill."""
        await self.client.config_set("appendfsync", "always")

    async def write(self, *rows: LedgerRow) -> list[int]:
        script = append_script()
        return [int(await self.client.eval(script, len(APPEND_KEYS), *APPEND_KEYS, *append_args(row))) for row in rows]

    async def compact(self) -> None:
        await self.compactor.catch_up()
        await self.compactor.book_late()
        while await self.compactor.compact(NOW_MS):
            pass

    async def entries(self) -> list[LedgerEntry]:
        return [entry async for page in self.reader.entries() for entry in page]

    async def names(self) -> list[str]:
        return [entry.row.id for entry in await self.entries()]

    async def spent(self) -> int:
        return sum(map(int, (await self.client.hgetall(keys.LEDGER_SPENT)).values()))


@asynccontextmanager
async def world(url: str, store: ObjectStore | None = None, **settings: int) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        made = World(url, store or FolderStore(Path(folder)), **settings)
        await made.client.flushall()
        await made.sync_always()
        try:
            yield made
        finally:
            await made.client.aclose()


def test_segments_and_stream_are_one(redis_url: str) -> None:
    async def scenario() -> None:
        async with world(redis_url) as it:
            await it.write(*(call(f"{i}", cost=i, at=AHEAD_MS) for i in range(10)))
            await it.compact()
            assert await it.client.xlen(keys.LEDGER) == 0
            await it.write(*(call(f"{i}", cost=i, at=AHEAD_MS) for i in range(10, 13)))
            assert await it.names() == [f"{i}" for i in range(13)]
            newest = [entry.row.id async for page in it.reader.newest() for entry in page]
            assert newest == [f"{i}" for i in reversed(range(13))]
            assert [h.rows for h in await it.reader.headers()] == [4, 4, 2]
            assert await it.spent() == sum(range(13))
            entries = await it.entries()
            since, until = entries[3].id.unix_ms, entries[11].id.unix_ms
            part = [e async for page in it.reader.entries(since, until) for e in page]
            assert part == [entry for entry in entries if since <= entry.id.unix_ms < until]

    asyncio.run(scenario())


def test_ids_leave_the_set_and_rows_are_still_taken_once(redis_url: str) -> None:
    async def scenario() -> None:
        async with world(redis_url) as it:
            rows = [call(f"{i}", cost=1, at=1000 + i) for i in range(9)]
            await it.write(*rows)
            last_ms = (await it.entries())[-1].id.unix_ms
            await it.compact()
            left: Any = await it.client.zrange(keys.LEDGER_IDS, 0, -1, withscores=True)
            assert [score for _, score in left if score < last_ms] == [], "all of them are in segments"
            assert set(await it.write(*rows)) <= {0, 2}, "known, or put aside"
            assert await it.write(call("late", cost=5, at=500)) == [2]
            assert await it.compactor.book_late() == 1
            assert await it.write(call("late", cost=5, at=500)) == [0]
            await it.compact()
            assert sorted(await it.names()) == sorted([*(row.id for row in rows), "late"])
            assert await it.spent() == 9 + 5
            assert await it.client.xlen(keys.LEDGER_LATE) == 0

    asyncio.run(scenario())


def test_ids_are_kept_for_a_while_so_that_repeating_is_cheap(redis_url: str) -> None:
    async def scenario() -> None:
        async with world(redis_url, ids_kept_ms=3_600_000) as it:
            await it.write(call("a"))
            await it.compact()
            assert await it.client.zcard(keys.LEDGER_IDS) == 1

    asyncio.run(scenario())


actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 9)),
        st.tuples(st.just("again"), st.integers(0, 30)),
        st.tuples(st.just("crash"), st.integers(0, 40)),
        st.tuples(st.just("race"), st.integers(0, 12)),
        st.tuples(st.just("compact"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_a_crash_between_any_two_steps_loses_and_doubles_nothing(redis_url: str, steps: list[tuple[str, int]]) -> None:
    """`crash` stops the compaction after that many turns of the event loop: what it sent may or may not have arrived.
    `race` lets two compact at once, one of them stopped; `again` writes a row that was written before."""

    async def scenario() -> None:
        async with world(redis_url) as it:
            rows: list[LedgerRow] = []
            for what, number in steps:
                if what == "write":
                    new = [
                        call(f"c{len(rows) + i}", cost=number, at=1000 + len(rows) + i)
                        if i % 2
                        else phase(f"p{len(rows) + i}", cost=1, at=1000 + len(rows) + i)
                        for i in range(number)
                    ]
                    rows += new
                    assert set(await it.write(*new)) <= {1, 2}
                elif what == "again" and rows:
                    assert set(await it.write(rows[number % len(rows)])) <= {0, 2}
                elif what == "crash":
                    await _stopped_after(number, it.compact())
                    it.successor()
                elif what == "race":
                    former = it.compactor
                    it.successor()
                    await asyncio.gather(it.compact(), _stopped_after(number, former.compact(NOW_MS)))
                elif what == "compact":
                    await it.compact()
                assert len(await it.names()) == len(set(await it.names()))
            it.successor()
            await it.compact()
            entries = await it.entries()
            assert sorted(entry.row.id for entry in entries) == sorted(row.id for row in rows)
            assert sum(entry.row.cost_nusd for entry in entries) == sum(row.cost_nusd for row in rows)
            assert await it.spent() == sum(row.cost_nusd for row in rows)
            await _check_chain(it, len(rows))

    asyncio.run(scenario())


async def _stopped_after(turns: int, work: object) -> None:
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0.0003)
    task.cancel()
    with suppress(asyncio.CancelledError, *REDIS_ERRORS):
        await task


async def _check_chain(it: World, rows: int) -> None:
    """Segments 1, 2, 3, ... each name the one before, and their rows count 1, 2, 3, ... up to all there are."""
    headers = await it.reader.headers()
    archive, after, number = LedgerArchive(it.store), None, 1
    for header in headers:
        found = await archive.find(header.sequence, after)
        assert found is not None
        assert found[0] == header
        assert header.first_row == number
        after, number = header, number + len(found[1])
    assert number - 1 == rows
    assert await it.store.size(segment_key(len(headers) + 1)) is None


def test_redis_comes_back_without_its_last_writes(redis_server: RedisServer) -> None:
    """A segment that Redis has forgotten is found again, with rows that it has, and with rows that it has not."""

    async def scenario() -> None:
        async with world(redis_server.url) as it:
            await it.write(*(call(f"{i}", cost=1) for i in range(4)))
            before = await it.client.dump(keys.LEDGER)
            assert before is not None
            await it.compact()
            await it.client.delete(keys.LEDGER_SEGMENTS, keys.LEDGER)
            await it.client.restore(keys.LEDGER, 0, before)
            it.successor()
            assert len(await it.names()) == 4
            await it.compact()
            assert len(await it.names()) == 4
            await it.client.flushall()
            it.successor()
            assert await it.compactor.catch_up() == 1
            assert len(await it.names()) == 4
            assert await it.write(call("1", cost=1)) == [2], "its journal has it still"
            assert await it.compactor.book_late() == 0
            assert len(await it.names()) == 4

    asyncio.run(scenario())


def test_redis_is_killed_under_compaction(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with world(redis_server.url) as it:
            for i in range(3):
                await it.write(*(call(f"{i}-{j}", cost=1, at=1000 + 10 * i + j) for j in range(9)))
                task = asyncio.ensure_future(it.compact())
                await asyncio.sleep(0.004 * i)
                redis_server.kill()
                with suppress(*REDIS_ERRORS):
                    await task
                await asyncio.to_thread(redis_server.start)
                await it.sync_always()
            it.successor()
            await it.compact()
            assert len(await it.names()) == len(set(await it.names())) == 27
            await _check_chain(it, 27)

    asyncio.run(scenario())


class Overwriting(FolderStore):
    """As an S3 server that has never heard of If-None-Match."""

    async def create(self, key: str, data: bytes) -> bool:
        await self.delete(key)
        return await super().create(key, data)


def test_a_store_that_overwrites_is_not_trusted_with_the_ledger(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(redis_url, Overwriting(tmp_path)) as it:
            await it.write(call("a"))
            with pytest.raises(StoreFailed, match="overwrites"):
                await it.compact()
            assert await it.names() == ["a"]

    asyncio.run(scenario())


def test_the_segments_of_another_system_are_not_taken_for_ours(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(redis_url, FolderStore(tmp_path)) as it:
            await it.write(*(call(f"ours{i}") for i in range(3)))
            await it.compact()
            await it.client.flushall()
            await it.client.xadd(keys.LEDGER, {"row": b"{}"}, id="5-0")
            it.successor()
            with pytest.raises(FleetError):
                await it.compact()
            assert await it.client.xlen(keys.LEDGER) == 1, "nothing is thrown away"

    asyncio.run(scenario())


def test_a_segment_that_was_changed_or_lost_is_reported(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(redis_url, FolderStore(tmp_path)) as it:
            await it.write(*(call(f"{i}") for i in range(3)))
            await it.compact()
            path = tmp_path / segment_key(1)
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            it.successor()
            with pytest.raises(ChecksumMismatch, match="segment 1"):
                await it.entries()
            os.unlink(path)
            with pytest.raises(NotFound, match="3 rows"):
                await it.entries()

    asyncio.run(scenario())
