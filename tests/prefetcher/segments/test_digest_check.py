"""Forged weights on a node: the digest finds what the checksum does not, and their workers are stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

import pytest

from fleetstart.prefetcher.segments.disk_cache import DiskCache
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import ChecksumMismatch, FleetError
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.forgery import FORGED_BYTES, forge
from tests.prefetcher.nodes import CHUNK_BYTES, Node, Store, spec_of
from tests.prefetcher.segment_cases import ONE, TWO, content, part_path, run

SERVES = "def load(weights): pass\ndef hello() -> str:\n    return 'hello'\n"


def replace_chunk(store: Store, checkpoint: CheckpointId, data: bytes, chunk: int) -> bytes:
    """Replaces a chunk in the store by one of the same checksum; returns what the part was."""
    path = part_path(store, checkpoint)
    whole = path.read_bytes()
    begin = len(whole) - len(data) + chunk * CHUNK_BYTES
    forged = forge(whole[begin : begin + CHUNK_BYTES], b"f" * FORGED_BYTES)
    path.write_bytes(whole[:begin] + forged + whole[begin + CHUNK_BYTES :])
    return whole


@pytest.mark.parametrize("cached", [False, True], ids=["memory", "disk"])
def test_a_forged_chunk_is_evicted_and_its_workers_are_stopped(store: Store, tmp_path: Path, cached: bool) -> None:
    data = os.urandom(5 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data, digests=True)
    whole = replace_chunk(store, checkpoint, data, 3)
    stopped: list[tuple[set[WorkerId], FleetError]] = []
    found = asyncio.Event()
    disk = DiskCache(tmp_path / "disk", 1 << 30) if cached else None

    def reject(workers: Collection[WorkerId], error: FleetError) -> None:
        stopped.append((set(workers), error))
        found.set()

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        assert await segments.acquire(checkpoint, TWO) is segment
        await found.wait()
        ((workers, error),) = stopped
        assert workers == {ONE, TWO}
        assert isinstance(error, ChecksumMismatch)
        assert f"chunk 3 of {checkpoint[:12]} (part-00000.safetensors bytes" in error.message
        assert "not the one that was published" in error.message
        assert "--repair" in error.hint
        assert segments.reports() == []
        assert disk is None or disk.image(checkpoint) is None
        for worker in (ONE, TWO):
            segments.release(segment, worker)
        assert segments.budget.used_bytes == 0
        with pytest.raises(ChecksumMismatch, match="not the one that was published"):  # no start gets them once more
            await segments.acquire(checkpoint, ONE)
        part_path(store, checkpoint).write_bytes(whole)
        again = await segments.acquire(checkpoint, ONE)
        assert again.error is None
        assert content(again, 0, len(data)) == data
        assert again.checked == set(range(5))
        assert len(stopped) == 2
        assert stopped[1][0] == {ONE}, "the start that waited"

    run(FolderSource(store.folder), scenario, disk=disk, reject=reject)


def test_each_chunk_is_checked_once(store: Store) -> None:
    checkpoint = store.put_checkpoint(os.urandom(5 * CHUNK_BYTES), digests=True)

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.verified.wait()
        assert segment.checked == set(range(5))
        assert segment.state == "ready"
        segments.release(segment, ONE)
        assert await segments.acquire(checkpoint, TWO) is segment
        assert segments.reports()[0].state == "ready"

    run(FolderSource(store.folder), scenario)


def test_a_checkpoint_without_digests_loads_as_before(store: Store) -> None:
    data = os.urandom(5 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    replace_chunk(store, checkpoint, data, 1)

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, ONE)
        await segment.filled.wait()
        assert segment.error is None
        assert segment.checked == set()
        assert content(segment, 0, len(data)) != data

    run(FolderSource(store.folder), scenario)


def test_a_worker_with_forged_weights_ends_with_the_reason(node: Node, store: Store) -> None:
    data = os.urandom(5 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data, digests=True)
    replace_chunk(store, checkpoint, data, 2)
    bundle = store.put_bundle({"handler.py": SERVES})
    for _ in range(2):
        status = node.wait_for(node.order(spec_of(bundle, weights=checkpoint)), "failed")
        assert status.error is not None
        assert status.error.code == "checksum_mismatch"
        assert "not the one that was published" in status.error.message
