"""The ledger archive: segments in the object store, created once, read whole, never changed.

Create-once makes the numbering safe: of two controllers that both schedule, the second one's publication fails. A store
that overwrites instead is detected before the first segment is written. The last segments read are cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from fleetstart.runtime.contract.errors import NotFound, StoreFailed

from ..storage.object_store import ObjectStore
from .archive_format import SEGMENT_MAX_BYTES, LedgerEntry, SegmentHeader, check_successor, unpack

FOLDER = "ledger/"
PROBE = FOLDER + "created-once"
KEPT_SEGMENTS = 4
"""Number of cached segments, with their rows: what a question about the last hours goes through again and again."""
KEPT_BYTES = 16 << 20
"""Bytes of their rows as they are stored; in memory, decoded, they take three times as much. A segment has 4 MB unless
it is set to have more rows."""


def segment_key(sequence: int) -> str:
    return f"{FOLDER}{sequence:012d}"


class LedgerArchive:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._kept: OrderedDict[int, tuple[list[LedgerEntry], int]] = OrderedDict()
        """Rows of the last segments that were read, and their bytes."""

    async def check_creates_once(self) -> None:
        """Checks that the store creates objects only once. Errors: StoreFailed if it would overwrite a segment."""
        await self._store.create(PROBE, b"first\n")
        if await self._store.create(PROBE, b"second\n"):
            raise StoreFailed(
                "the object store overwrites objects that were to be created once (If-None-Match)",
                hint="the ledger stays in Redis; use a store that has conditional writes, or a folder",
            )

    async def create(self, header: SegmentHeader, data: bytes) -> bool:
        """Publishes a segment; False if the store has one of that number."""
        return await self._store.create(segment_key(header.sequence), data)

    async def find(self, sequence: int, after: SegmentHeader | None) -> tuple[SegmentHeader, list[LedgerEntry]] | None:
        """Reads a segment if it exists. Errors: StoreFailed; ChecksumMismatch, also if it does not follow `after`."""
        data = await self._store.read(segment_key(sequence), SEGMENT_MAX_BYTES)
        if data is None:
            return None
        header, entries = await asyncio.to_thread(unpack, data, sequence)
        check_successor(header, after)
        return header, entries

    async def entries(self, known: SegmentHeader) -> list[LedgerEntry]:
        """The rows of a segment whose header is known. Errors: NotFound, StoreFailed, ChecksumMismatch."""
        if known.sequence in self._kept:
            self._kept.move_to_end(known.sequence)
            return self._kept[known.sequence][0]
        key = segment_key(known.sequence)
        data = await self._store.read(key, SEGMENT_MAX_BYTES)
        if data is None:
            raise NotFound(f"{key} with {known.rows:,} rows of the ledger is not in the store any more")
        header, entries = await asyncio.to_thread(unpack, data, known.sequence)
        if header != known:
            raise StoreFailed(f"{key} is another segment than the one that was published under that name")
        self._keep(known.sequence, entries)
        return entries

    def _keep(self, sequence: int, entries: list[LedgerEntry]) -> None:
        self._kept[sequence] = entries, sum(len(entry.raw) for entry in entries)
        while len(self._kept) > KEPT_SEGMENTS or sum(size for _, size in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
