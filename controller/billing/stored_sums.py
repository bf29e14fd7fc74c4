"""Stored sums of the ledger's segments: made once for each block by the scheduling controller, read for bills.

What is not there yet, as after an upgrade, or cannot be trusted is summed from the rows: the bill is the same, and
takes longer. Rows that are in no segment yet, and those of segments that are partly in a bill's time, are summed from
the rows, too. Nothing is summed anew when a late row comes: it is booked in a later segment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from fleetstart.runtime.contract.errors import ChecksumMismatch, FleetError, TooLarge

from ..state.redis_client import REDIS_ERRORS
from ..storage.object_store import ObjectStore
from .archive_format import SegmentHeader
from .archive_store import LedgerArchive
from .group_sums import SUM_MAX_BYTES, Block, Sums, all_blocks, blocks, joined, pack_sums, sum_rows, unpack_sums
from .ledger_reader import LedgerReader, Segments

log = logging.getLogger(__name__)

FOLDER = "ledger-sums/1/"
"""The number is that of the format: a release that stores sums in another one has a folder of its own."""
AT_ONCE = 8
"""Sums that are read at a time, so that a store some milliseconds away is no longer to wait for than its bytes."""
PAUSE_S = 1.0
"""Pause after each block that was made: after an upgrade there may be a thousand, and the processor is for calls."""
CHECK_S = 30.0
LIST_S = 3600.0
"""How often the store is asked which sums it has: another controller may have removed one that was damaged."""


def sum_key(block: Block) -> str:
    return f"{FOLDER}{block.segments}/{block.first:012d}"


class StoredSums:
    def __init__(
        self, store: ObjectStore, archive: LedgerArchive, reader: LedgerReader, fence: Callable[[], int]
    ) -> None:
        """`fence`: 0 while another controller schedules."""
        self._store = store
        self._archive = archive
        self._reader = reader
        self._fence = fence
        self._made: set[str] | None = None
        """Keys of the sums in the store; None: not known yet."""
        self._listed_s = 0.0

    # ── reading ────────────────────────────────────────────────────────────────────────────────────

    async def read(self, since_unix_ms: int, until_unix_ms: int) -> AsyncGenerator[Sums, None]:
        """Sums that together have each row once that was booked from `since` until just before `until`.

        Errors: REDIS_ERRORS and those of `LedgerArchive.entries`.
        """
        async for part in self._reader.parts(since_unix_ms, until_unix_ms):
            if isinstance(part, Segments):
                async for sums in self._of_segments(part.headers):
                    yield sums
            else:
                yield (await asyncio.to_thread(sum_rows, part)).items()

    async def _of_segments(self, headers: Sequence[SegmentHeader]) -> AsyncGenerator[Sums, None]:
        first = headers[0].sequence
        wanted = list(blocks(first, headers[-1].sequence))
        for begin in range(0, len(wanted), AT_ONCE):
            some = wanted[begin : begin + AT_ONCE]
            parts = [headers[one.first - first : one.first - first + one.segments] for one in some]
            found = await asyncio.gather(*(self._stored(*one) for one in zip(some, parts, strict=True)))
            for part, sums in zip(parts, found, strict=True):
                if sums is not None:
                    yield sums
                elif len(part) > 1:
                    for header in part:
                        yield await self._of_segment(header)
                else:
                    yield await self._of_rows(part[0])

    async def _of_segment(self, header: SegmentHeader) -> Sums:
        stored = await self._stored(Block(header.sequence, 1), [header])
        return await self._of_rows(header) if stored is None else stored

    async def _of_rows(self, header: SegmentHeader) -> Sums:
        return (await asyncio.to_thread(sum_rows, await self._archive.entries(header))).items()

    async def _stored(self, block: Block, headers: Sequence[SegmentHeader]) -> Sums | None:
        """The stored sum of a block; None if there is none that can be trusted."""
        key = sum_key(block)
        try:
            data = await self._store.read(key, SUM_MAX_BYTES)
            return None if data is None else await asyncio.to_thread(unpack_sums, data, headers)
        except (ChecksumMismatch, TooLarge) as error:
            log.warning("a stored sum of the ledger is made anew", extra={"object": key, "error": error.message})
            await self._store.delete(key)
            if self._made is not None:
                self._made.discard(key)
            return None

    # ── making ─────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        while True:
            pause_s = CHECK_S
            try:
                if not self._fence():
                    self._made = None
                elif await self.make_one():
                    pause_s = PAUSE_S
            except REDIS_ERRORS as error:
                log.warning("the ledger is not summed: redis is unavailable", extra={"error": str(error)})
            except FleetError as error:
                log.error("the ledger is not summed: %s", error.message, extra={"hint": error.hint})
            await asyncio.sleep(pause_s)

    async def make_one(self) -> bool:
        """Makes the newest sum that is missing; False if none is. Errors: REDIS_ERRORS, FleetError."""
        if self._made is None or time.monotonic() - self._listed_s > LIST_S:
            self._made = {stored.key for stored in await self._store.list(FOLDER)}
            self._listed_s = time.monotonic()
        headers = await self._reader.headers()
        block = next((one for one in all_blocks(len(headers)) if sum_key(one) not in self._made), None)
        if block is None:
            return False
        part = headers[block.first - 1 : block.first - 1 + block.segments]
        if block.segments == 1:
            sums = await self._of_rows(part[0])
        else:
            sums = (await asyncio.to_thread(joined, [await self._of_segment(header) for header in part])).items()
        data = await asyncio.to_thread(pack_sums, sums, part)
        if data:
            await self._store.create(sum_key(block), data)
        self._made.add(sum_key(block))
        return True
