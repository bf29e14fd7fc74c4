"""Pins of readers' threads: held from the answer to the release, and by nobody who has given up."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from fleetstart.prefetcher.peers import holdings
from fleetstart.prefetcher.peers.holdings import Held, Holdings
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.prefetcher.nodes import CHUNK_BYTES, Store

OWNER, READER, LATER = WorkerId("w-1"), WorkerId("peer-1"), WorkerId("peer-2")


async def with_segment(store: Store, checkpoint: CheckpointId) -> tuple[SegmentStore, Segment]:
    """A node's memory with the whole checkpoint, which nobody has pinned."""
    segments = SegmentStore(source=FolderSource(store.folder), memory_bytes=1 << 30, workers_bytes=lambda: 0, threads=4)
    segment = await segments.acquire(checkpoint, OWNER)
    await segment.filled.wait()
    segments.release(segment, OWNER)
    return segments, segment


def test_a_reader_that_gave_up_while_the_loop_stood_has_no_pin(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "LOOP_S", 0.05)
    checkpoint = store.put_checkpoint(os.urandom(4 * CHUNK_BYTES))

    async def scenario() -> None:
        segments, segment = await with_segment(store, checkpoint)
        readers = Holdings(segments)
        got: list[Held | None] = []
        reader = threading.Thread(target=lambda: got.append(readers.pin(checkpoint, READER, 0.0)))
        reader.start()
        reader.join()  # the loop stands until it has given up
        monkeypatch.setattr(holdings, "LOOP_S", 30.0)

        held = await asyncio.to_thread(readers.pin, checkpoint, LATER, 0.0)

        assert got == [None]
        assert held is not None
        assert segment.pins == {LATER}
        await asyncio.to_thread(readers.unpin, held, LATER)
        async with asyncio.timeout(30):
            while segment.pins:
                await asyncio.sleep(0.01)
        await segments.close()

    asyncio.run(scenario())


def test_a_pin_that_comes_as_its_reader_gives_up_is_the_reader_s(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is pinned in the moment of its deadline either reaches it or is released: it is never lost."""
    monkeypatch.setattr(holdings, "LOOP_S", 0.0)
    checkpoint = store.put_checkpoint(os.urandom(4 * CHUNK_BYTES))

    async def scenario() -> None:
        segments, segment = await with_segment(store, checkpoint)
        readers = Holdings(segments)

        def read() -> None:
            for number in range(500):
                name = WorkerId(f"peer-{number}")
                held = readers.pin(checkpoint, name, number % 5 * 1e-4)
                if held is not None:
                    readers.unpin(held, name)

        await asyncio.to_thread(read)
        async with asyncio.timeout(30):
            while segment.pins or len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        await segments.close()

    asyncio.run(scenario())
