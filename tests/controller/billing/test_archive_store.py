"""Archive of the ledger: segments that were read are cached, up to a number and up to bytes."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from fleetstart.controller.billing import archive_store
from fleetstart.controller.billing.archive_format import SegmentHeader, decode_entry, pack
from fleetstart.controller.billing.archive_store import KEPT_SEGMENTS, LedgerArchive
from fleetstart.controller.storage.folder_store import FolderStore
from tests.controller.billing.rows import ROW_BYTES, call

ROWS = 200


async def archive_of(folder: Path, segments: int) -> tuple[LedgerArchive, list[SegmentHeader]]:
    archive, headers = LedgerArchive(FolderStore(folder)), list[SegmentHeader]()
    for sequence in range(1, segments + 1):
        rows = [call(f"inv-{sequence:010}{number:010}", cost=number, tags={"team": "ml"}) for number in range(ROWS)]
        entries = [decode_entry(b"%d-%d" % (sequence, at), msgspec.json.encode(row)) for at, row in enumerate(rows)]
        header, data = pack(entries, headers[-1] if headers else None)
        assert await archive.create(header, data)
        headers.append(header)
    return archive, headers


def test_questions_about_many_segments_keep_the_memory_of_a_few(tmp_path: Path) -> None:
    """The bound that the soak's verdict allows for."""

    async def scenario() -> None:
        archive, headers = await archive_of(tmp_path, 3 * KEPT_SEGMENTS)
        tracemalloc.start()
        try:
            for header in headers * 2:
                assert len(await archive.entries(header)) == ROWS
            gc.collect()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert list(archive._kept) == [header.sequence for header in headers[-KEPT_SEGMENTS:]]
        assert held_bytes < KEPT_SEGMENTS * ROWS * ROW_BYTES

    asyncio.run(scenario())


def test_segments_of_many_rows_are_cached_up_to_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        archive, headers = await archive_of(tmp_path, 3)
        size_bytes = sum(len(entry.raw) for entry in await archive.entries(headers[0]))
        monkeypatch.setattr(archive_store, "KEPT_BYTES", 2 * size_bytes + size_bytes // 2)
        for header in headers:
            await archive.entries(header)
        assert list(archive._kept) == [2, 3]
        monkeypatch.setattr(archive_store, "KEPT_BYTES", size_bytes // 2)
        assert len(await archive.entries(headers[0])) == ROWS
        assert not archive._kept, "one that is larger than the bound is read each time"

    asyncio.run(scenario())
