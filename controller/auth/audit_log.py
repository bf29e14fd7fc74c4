"""The audit log: caller, action, object, time, address and result of each change, and of each rejected request.

A change is noted in a local file before it begins (`audit_journal`) and written before its response goes out, or, if
Redis goes away meanwhile, as soon as it is back. Rejections are many under attack, so they
are counted and sampled (`RejectionSampler`). The log is a stream in Redis; rows beyond `STREAM_ROWS` move to the object
store (`archive`) and are read from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import TooLarge
from fleetstart.runtime.contract.process.tasks import run_all
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from ..schemas.access import AuditEvent
from ..state.redis_client import REDIS_ERRORS
from ..storage.object_store import ObjectStore
from .audit_journal import AuditJournal

log = logging.getLogger(__name__)

_EVENTS = RecordDecoder(AuditEvent)

STREAM_ROWS = 20_000
SEGMENT_ROWS = 10_000
"""Rows of one object in the store."""
SEGMENT_MAX_BYTES = 32 << 20
ARCHIVE_EVERY_S = 5.0
REJECTIONS_EVERY_MS = 10_000
"""Interval between two rows about the same caller, address, verb and error code."""
REJECTIONS_MAX = 512
"""Distinct kinds of rejections that are tracked: a flood of names does not become a flood of rows."""
WAITING_MAX = 256
LATE_EVERY_S = 1.0
FOLDER = "audit/"
USED_EVERY_S = 5.0


class RejectedRequest(NamedTuple):
    """A request that authentication or authorization rejected."""

    by: str
    address: str
    verb: str
    object: str
    status: int
    code: str


class RejectionSampler:
    """Samples rejections: one row per kind and interval, with the count. Pure: values and the time in, rows out."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str, str, str], tuple[int, int]] = OrderedDict()
        """→ (when it was last written, how many since)."""

    def sample(self, rejected: RejectedRequest, now_unix_ms: int) -> AuditEvent | None:
        """The row to write for this rejection; None if it is only counted."""
        key = (rejected.by, rejected.address, rejected.verb, rejected.code)
        last_unix_ms, more = self._seen.pop(key, (0, 0))
        if now_unix_ms - last_unix_ms < REJECTIONS_EVERY_MS:
            self._seen[key] = (last_unix_ms, more + 1)
            return None
        self._seen[key] = (now_unix_ms, 0)
        while len(self._seen) > REJECTIONS_MAX:
            self._seen.popitem(last=False)
        return AuditEvent(
            unix_ms=now_unix_ms,
            by=rejected.by,
            address=rejected.address,
            verb=rejected.verb,
            object=rejected.object,
            status=rejected.status,
            code=rejected.code,
            times=more + 1,
        )


class AuditLog:
    """Writes and reads the audit log, and moves its old rows to the store."""

    def __init__(
        self, client: redis.Redis, store: ObjectStore, fence: Callable[[], int], journal: AuditJournal | None = None
    ) -> None:
        """`fence` is 0 while another controller schedules: one moves old lines to the store."""
        self._journal = journal
        self._late: dict[int, AuditEvent] = {}
        """Changes that were made while Redis was away, by their numbers in the journal."""
        self._client = client
        self._store = store
        self._fence = fence
        self._rejections = RejectionSampler()
        self._waiting: list[AuditEvent] = []
        self._used: dict[str, int] = {}
        self._arrived = asyncio.Event()

    async def write(self, event: AuditEvent) -> None:
        """Writes one row. Errors: REDIS_ERRORS."""
        await self._client.xadd(keys.AUDIT, {"event": msgspec.json.encode(event)})

    def begin(self, event: AuditEvent) -> int:
        """Notes a change before it is made; returns the number to `end` it with."""
        return self._journal.begin(event) if self._journal is not None else 0

    async def end(self, number: int, event: AuditEvent) -> None:
        """Writes a change with its result, now or when Redis is back."""
        try:
            await self.write(event)
        except REDIS_ERRORS as error:
            log.error("a change is not in the audit log yet", extra={"event": str(event), "error": str(error)})
            if self._journal is not None:
                self._journal.ended(number, event)
                self._late[number] = event
        else:
            self._written(number)

    def _written(self, number: int) -> None:
        self._late.pop(number, None)
        if self._journal is not None:
            self._journal.written(number)

    def record_rejection(self, rejected: RejectedRequest) -> None:
        """Queues a row for a rejection, if it is due."""
        event = self._rejections.sample(rejected, time.time_ns() // 1_000_000)
        if event is not None and len(self._waiting) < WAITING_MAX:
            self._waiting.append(event)
            self._arrived.set()

    def record_use(self, key: str, unix_ms: int) -> None:
        """Notes the last use of a key, which is written within `USED_EVERY_S`."""
        self._used[key] = unix_ms

    # ── in the background ──────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        await run_all(self._write_late(), self._write_rejections(), self._write_used(), self._archive_in_background())

    async def _write_late(self) -> None:
        """Writes what dead controllers of this home left, and what came while Redis was away."""
        recovered = False
        while True:
            try:
                if not recovered:
                    await self.recover()
                    recovered = True
                for number, event in list(self._late.items()):
                    await self.write(event)
                    self._written(number)
            except REDIS_ERRORS as error:
                log.warning("changes are not in the audit log yet", extra={"error": str(error)})
            await asyncio.sleep(LATE_EVERY_S)

    async def recover(self) -> None:
        """Writes the changes that dead controllers of this home had begun. Errors: REDIS_ERRORS."""
        for path, events in self._journal.recover() if self._journal is not None else ():
            for event in events:
                await self.write(event)
            path.unlink(missing_ok=True)

    async def _write_rejections(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                while self._waiting:
                    await self.write(self._waiting[0])
                    self._waiting.pop(0)
            except REDIS_ERRORS as error:
                log.warning("rejections are not written to the audit log yet", extra={"error": str(error)})
                await asyncio.sleep(ARCHIVE_EVERY_S)
                self._arrived.set()

    async def _write_used(self) -> None:
        while True:
            await asyncio.sleep(USED_EVERY_S)
            used, self._used = self._used, {}
            if used:
                try:
                    await self._client.hset(keys.KEYS_USED, mapping={name: str(at) for name, at in used.items()})
                except REDIS_ERRORS:
                    self._used = used | self._used

    async def _archive_in_background(self) -> None:
        while True:
            await asyncio.sleep(ARCHIVE_EVERY_S)
            if self._fence():
                try:
                    await self.archive()
                except REDIS_ERRORS as error:
                    log.warning("the audit log was not archived", extra={"error": str(error)})
                except Exception as error:
                    log.warning("the audit log was not written to the store", extra={"error": str(error)})

    async def archive(self, rows: int = STREAM_ROWS, segment_rows: int = SEGMENT_ROWS) -> None:
        """Moves the oldest rows to the store while there are more than `rows`. Idempotent: an object is named after its
        first row, and rows leave the stream only when it is written."""
        while int(await self._client.xlen(keys.AUDIT)) > rows:
            entries: Any = await self._client.xrange(keys.AUDIT, count=segment_rows)
            first, last = entries[0][0].decode(), entries[-1][0].decode()
            lines = b"".join(entry + b" " + fields[b"event"] + b"\n" for entry, fields in entries)
            unix_ms, _, number = first.partition("-")
            name = f"{FOLDER}{int(unix_ms):016d}-{number}-{len(entries)}.z"
            await self._store.create(name, zlib.compress(lines))
            unix_ms, _, number = last.partition("-")
            await self._client.xtrim(keys.AUDIT, minid=f"{unix_ms}-{int(number) + 1}", approximate=False)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────

    async def read(
        self, since_unix_ms: int, by: str, limit: int, fits: Callable[[AuditEvent], bool] = lambda event: True
    ) -> list[AuditEvent]:
        """Returns the newest rows first, of those that fit. Errors: REDIS_ERRORS, StoreFailed."""
        found: list[AuditEvent] = []
        async for event in self._newest(since_unix_ms):
            if by in ("", event.by) and fits(event):
                found.append(event)
                if len(found) >= limit:
                    break
        return found

    async def _newest(self, since_unix_ms: int) -> AsyncIterator[AuditEvent]:
        """Yields each row once, though it may be both in the store and in Redis, or in two objects."""
        entries: Any = await self._client.xrevrange(keys.AUDIT, min=str(since_unix_ms))
        oldest: _RowId | None = None
        for entry, fields in entries:
            oldest = _row_id(entry)
            with contextlib.suppress(UnreadableRecord):  # of another release, which shows it
                yield _EVENTS.decode(fields[b"event"])
        objects = await self._store.list(FOLDER)
        for key in sorted((one.key for one in objects), key=_first_row_id, reverse=True):
            data = await self._store.read(key, SEGMENT_MAX_BYTES)
            if data is None:
                continue
            for line in reversed(_lines(key, data)):
                entry, _, event = line.partition(b" ")
                row_id = _row_id(entry)
                if row_id.unix_ms < since_unix_ms:
                    return
                if oldest is None or row_id < oldest:
                    oldest = row_id
                    with contextlib.suppress(UnreadableRecord):
                        yield _EVENTS.decode(event)


class _RowId(NamedTuple):
    """Position of a row in the stream."""

    unix_ms: int
    number: int


def _row_id(entry: bytes) -> _RowId:
    unix_ms, _, number = entry.partition(b"-")
    return _RowId(int(unix_ms), int(number))


def _first_row_id(key: str) -> _RowId:
    unix_ms, number, _ = key.removeprefix(FOLDER).split("-")
    return _RowId(int(unix_ms), int(number))


def _lines(key: str, data: bytes) -> list[bytes]:
    inflater = zlib.decompressobj()
    text = inflater.decompress(data, SEGMENT_MAX_BYTES)
    if inflater.unconsumed_tail:
        raise TooLarge(f"{key} decompresses to more than {SEGMENT_MAX_BYTES} bytes")
    return text.splitlines()
