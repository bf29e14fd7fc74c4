"""The ledger reader: segments and the rest of the stream as one sequence, in the order of booking.

Each page is read together with the number of segments, in one transaction, so a compaction in between is seen: what it
took from the stream is then read from its segment. Entry ids grow over both, so nothing is read twice or missed.
Where a row was booked decides what it counts to (day, month, budget), not when its call began: that is within a second
or so of its end, and a row that had to wait for Redis is booked when it comes. So what was summed once stays as it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import ChecksumMismatch

from .archive_format import EntryId, LedgerEntry, SegmentHeader, decode_entry, decode_header
from .archive_store import LedgerArchive

PAGE_ROWS = 500
"""Rows read at a time: a few milliseconds, then the event loop serves calls."""
BEFORE_ALL = EntryId(0, 0)


class Segments(NamedTuple):
    """Segments that follow one another."""

    headers: tuple[SegmentHeader, ...]


class LedgerReader:
    def __init__(self, client: redis.Redis, archive: LedgerArchive) -> None:
        self._client = client
        self._archive = archive
        self._headers: list[SegmentHeader] = []

    async def entries(
        self, since_unix_ms: int = 0, until_unix_ms: int | None = None
    ) -> AsyncGenerator[list[LedgerEntry], None]:
        """Pages of the rows booked from `since` until just before `until`.

        Errors: REDIS_ERRORS and those of `LedgerArchive.entries`.
        """
        async for part in self.parts(since_unix_ms, until_unix_ms):
            if isinstance(part, Segments):
                for header in part.headers:
                    yield await self._archive.entries(header)
            else:
                yield part

    async def parts(
        self, since_unix_ms: int = 0, until_unix_ms: int | None = None
    ) -> AsyncGenerator[Segments | list[LedgerEntry], None]:
        """The same rows, but segments that are in that time with all of their rows are named and not read."""
        cursor = max(BEFORE_ALL, EntryId(since_unix_ms, -1))
        until = EntryId(1 << 63 if until_unix_ms is None else until_unix_ms, -1)
        while True:
            headers, page = await self._snapshot("XRANGE", _after(cursor), "+")
            at = bisect_right(headers, cursor, key=lambda header: header.last)
            end = bisect_right(headers, until, lo=at, key=lambda header: header.last)
            begun = at < len(headers) and headers[at].first <= cursor
            if at < end and not begun:
                yield Segments(tuple(headers[at:end]))
                cursor = headers[end - 1].last
                continue
            whole = at < len(headers)
            if whole and headers[at].first >= until:
                return
            if whole:
                page = [entry for entry in await self._archive.entries(headers[at]) if entry.id > cursor]
            wanted = [entry for entry in page if entry.id < until]
            if wanted:
                yield wanted
            if len(wanted) < len(page) or (not whole and len(page) < PAGE_ROWS):
                return
            cursor = page[-1].id

    async def newest(self) -> AsyncGenerator[list[LedgerEntry], None]:
        """All rows in pages, the newest first."""
        cursor: EntryId | None = None
        while True:
            headers, page = await self._snapshot("XREVRANGE", "+" if cursor is None else f"({cursor}", "-")
            last = headers[-1].last if headers else BEFORE_ALL
            page = [entry for entry in page if entry.id > last]
            if not page:
                break
            yield page
            cursor = page[-1].id
        for header in reversed(headers):
            entries = await self._archive.entries(header)
            older = [entry for entry in reversed(entries) if cursor is None or entry.id < cursor]
            if older:
                yield older

    async def headers(self) -> list[SegmentHeader]:
        """Headers of all segments known to Redis. Errors: REDIS_ERRORS, ChecksumMismatch."""
        count = int(await self._client.hlen(keys.LEDGER_SEGMENTS))
        return await self._known(count)

    async def _snapshot(self, command: str, start: str, end: str) -> tuple[list[SegmentHeader], list[LedgerEntry]]:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hlen(keys.LEDGER_SEGMENTS)
            getattr(pipe, command.lower())(keys.LEDGER, start, end, PAGE_ROWS)
            count, page = await pipe.execute()
        entries = [decode_entry(entry_id, fields[b"row"]) for entry_id, fields in page]
        return await self._known(int(count)), entries

    async def _known(self, count: int) -> list[SegmentHeader]:
        """The first `count` headers; new ones are read, and must follow the last known one."""
        if count < len(self._headers):  # Redis came back with less than it had: the scheduler will find the rest again
            self._headers = self._headers[:count]
        missing = range(len(self._headers) + 1, count + 1)
        if missing:
            raw: Any = await self._client.hmget(keys.LEDGER_SEGMENTS, [str(n) for n in missing])
            for sequence, line in zip(missing, raw, strict=True):
                if line is None:
                    raise ChecksumMismatch(f"segment {sequence} of {count} is missing in {keys.LEDGER_SEGMENTS}")
                self._headers.append(decode_header(line, sequence))
        return self._headers[:count]


def _after(cursor: EntryId) -> str:
    return str(EntryId(cursor.unix_ms, 0)) if cursor.number < 0 else f"({cursor}"
