"""Compaction: moves the ledger from Redis into segments, in steps that are safe against a crash between any two.

1. Read the oldest rows, and wait until Redis' disk has them: from now on no crash takes them out of the stream again.
2. Publish the segment. The store creates an object once, so this commits it, whichever controller does it.
3. Record it in Redis (`compact.lua`): the segment is known, its entries leave the stream, old ids leave the set.

After a crash between 2 and 3, or with a Redis that came back older than it was, the rows are in both places, and
readers go by what Redis knows: nothing is missed or read twice. The next scheduler finds the segment when it looks for
one that follows the last it knows, or when it tries to publish its own, and goes on with step 3.

Run by the controller that holds the leader lease; two at a time do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.durability import on_disk
from fleetstart.runtime.contract.billing.ledger import LedgerRow, began_unix_ms
from fleetstart.runtime.contract.errors import FleetError, StoreFailed

from ..state.redis_client import REDIS_ERRORS, Script
from .archive_format import SEGMENT_BYTES, EntryId, LedgerEntry, SegmentHeader, decode_entry, pack, parse_entry
from .archive_store import LedgerArchive
from .ledger_reader import PAGE_ROWS, LedgerReader

log = logging.getLogger(__name__)

CHECK_S = 2.0
TROUBLE_S = 30.0
SEGMENT_AGE_MS = 3_600_000
"""Maximum age of a row in Redis: a quiet system makes 24 small segments a day."""
IDS_KEPT_MS = 3_600_000
"""Retention of row ids in Redis: a writer that is not sure of a write repeats it within seconds."""
SPENT_KEPT_DAYS = 62
"""Retention of daily sums: budgets look back to the first of a month."""
LATE_ROWS = 100
DISK_MS = 1_500


class Compactor:
    def __init__(
        self,
        client: redis.Redis,
        archive: LedgerArchive,
        reader: LedgerReader,
        fence: Callable[[], int],
        *,
        segment_rows: int,
        segment_age_ms: int = SEGMENT_AGE_MS,
        ids_kept_ms: int = IDS_KEPT_MS,
    ) -> None:
        """`fence`: 0 while another controller schedules."""
        self._client = client
        self._archive = archive
        self._reader = reader
        self._fence = fence
        self._segment_rows = segment_rows
        self._segment_age_ms = segment_age_ms
        self._ids_kept_ms = ids_kept_ms
        self._commit = Script(client, "compact")
        self._book_late = Script(client, "book_late_row")
        self._caught_up_as = 0
        self._checked = False

    async def run(self) -> None:
        while True:
            pause_s = CHECK_S
            try:
                if self._fence():
                    await self._tick()
            except REDIS_ERRORS as error:
                log.warning("the ledger cannot be compacted: redis is unavailable", extra={"error": str(error)})
            except FleetError as error:
                log.error("the ledger is not compacted: %s", error.message, extra={"hint": error.hint})
                pause_s = TROUBLE_S
            await asyncio.sleep(pause_s)

    async def _tick(self) -> None:
        fence = self._fence()
        if fence != self._caught_up_as:
            await self.catch_up()
            self._caught_up_as = fence
        now_unix_ms = time.time_ns() // 1_000_000
        await self.book_late()
        while await self.compact(now_unix_ms):
            pass

    # ── segments ───────────────────────────────────────────────────────────────────────────────────

    async def catch_up(self) -> int:
        """Records published segments that Redis does not know; returns their number."""
        found = 0
        while (segment := await self._archive.find(*await self._next())) is not None:
            await self._settle(segment[0], found=True)
            found += 1
        return found

    async def compact(self, now_unix_ms: int) -> bool:
        """Makes one segment if one is due. Errors: REDIS_ERRORS, StoreFailed, ChecksumMismatch."""
        if not await self._due(now_unix_ms):
            return False
        await self._check_store()
        _, after = await self._next()
        entries = await self._oldest()
        if not entries:
            return True
        header, data = await asyncio.to_thread(pack, entries, after)
        if not await self._archive.create(header, data):
            await self.catch_up()
            return True
        await self._settle(header)
        log.info("a segment of the ledger is written", extra={"segment": header.sequence, "rows": header.rows})
        return True

    async def _due(self, now_unix_ms: int) -> bool:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.xlen(keys.LEDGER)
            pipe.xrange(keys.LEDGER, "-", "+", 1)
            length, oldest = await pipe.execute()
        if not oldest:
            return False
        return bool(
            length >= self._segment_rows or now_unix_ms - parse_entry(oldest[0][0]).unix_ms > self._segment_age_ms
        )

    async def _check_store(self) -> None:
        if not self._checked:
            await self._archive.check_creates_once()
            self._checked = True

    async def _next(self) -> tuple[int, SegmentHeader | None]:
        headers = await self._reader.headers()
        return len(headers) + 1, headers[-1] if headers else None

    async def _oldest(self) -> list[LedgerEntry]:
        """The oldest entries, as many as fit a segment; on Redis' disk when this returns. Errors: REDIS_ERRORS."""
        entries: list[LedgerEntry] = []
        size_bytes, start, whole = 0, "-", False
        while not whole:
            page: Any = await self._client.xrange(
                keys.LEDGER, start, "+", min(PAGE_ROWS, self._segment_rows - len(entries))
            )
            for entry_id, fields in page:
                size_bytes += len(fields[b"row"])
                whole = bool(entries) and size_bytes > SEGMENT_BYTES
                if whole:
                    break
                entries.append(decode_entry(entry_id, fields[b"row"]))
            if not entries:
                return []  # another controller has compacted meanwhile
            start = f"({entries[-1].id}"
            whole = whole or len(page) < PAGE_ROWS or len(entries) >= self._segment_rows
        await self._wait_for_disk(len(entries))
        return entries

    async def _wait_for_disk(self, rows: int) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(keys.durable("compactor"), 1, ex=60)
            pipe.execute_command("WAITAOF", 1, 0, DISK_MS)
            mark, answer = await pipe.execute(raise_on_error=False)
        if isinstance(mark, Exception):
            raise mark
        if on_disk(answer) == "not yet":
            raise TimeoutError(f"{rows} rows are not on Redis' disk after {DISK_MS} ms")

    async def _settle(self, header: SegmentHeader, *, found: bool = False) -> None:
        """Records a segment, and removes its entries and old row ids.

        A Redis that did not know the segment may not know its row ids either: from then on they are looked up in the
        segments.
        """
        await self._check_stream(header)
        last_ms = header.last.unix_ms
        forget_ms = min(last_ms, time.time_ns() // 1_000_000 - self._ids_kept_ms)
        behind = EntryId(last_ms, header.last.number + 1)
        await self._commit(
            [keys.LEDGER_SEGMENTS, keys.LEDGER, keys.LEDGER_IDS, keys.LEDGER_HORIZON],
            [header.sequence, header.line, str(behind), max(0, forget_ms), last_ms + 1 if found else max(0, forget_ms)],
        )
        await self._forget_spent(last_ms // 86_400_000 - SPENT_KEPT_DAYS)

    async def _check_stream(self, header: SegmentHeader) -> None:
        """Checks that the entries to be removed are those of the segment. Errors: StoreFailed."""
        oldest: Any = await self._client.xrange(keys.LEDGER, "-", "+", 1)
        if oldest and header.first != parse_entry(oldest[0][0]) <= header.last:
            raise StoreFailed(
                f"segment {header.sequence} begins with entry {header.first_entry}, the ledger in Redis with "
                f"{oldest[0][0].decode()}: they are of different systems",
                hint="give each system a store, or a prefix, of its own",
            )

    async def _forget_spent(self, before_day: int) -> None:
        fields: Any = await self._client.hkeys(keys.LEDGER_SPENT)
        old = [field for field in fields if int(field.partition(b":")[0]) < before_day]
        if old:
            await self._client.hdel(keys.LEDGER_SPENT, *old)

    # ── late rows ──────────────────────────────────────────────────────────────────────────────────

    async def book_late(self) -> int:
        """Books late rows, whose ids Redis may have forgotten, unless a segment has them; returns the number of new
        ones."""
        booked = 0
        names = [keys.LEDGER_LATE, keys.LEDGER_IDS, keys.LEDGER, keys.LEDGER_SEGMENTS, keys.LEDGER_SPENT]
        while page := cast(Any, await self._client.xrange(keys.LEDGER_LATE, "-", "+", LATE_ROWS)):
            for entry_id, fields in page:
                row = decode_entry(entry_id, fields[b"row"]).row
                headers = await self._reader.headers()
                new = b"" if await self._in_segments(row, headers) else fields[b"row"]
                args = [entry_id, row.id, new, row.function, row.cost_nusd, len(headers)]
                booked += await self._book_late(names, args) == 1
        return booked

    async def _in_segments(self, row: LedgerRow, headers: list[SegmentHeader]) -> bool:
        """Checks whether a segment has the row. Its own time is the same in every copy, so few segments can have it."""
        began = began_unix_ms(row)
        for header in headers:
            if header.first_unix_ms <= began <= header.last_unix_ms:
                entries = await self._archive.entries(header)
                if any(entry.row.id == row.id for entry in entries):
                    return True
        return False
