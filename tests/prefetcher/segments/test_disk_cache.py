"""The disk cache: a fetched checkpoint is read from the disk the next time, verified again, and never costs a start."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart import native
from fleetstart.prefetcher.segments import disk_cache
from fleetstart.prefetcher.segments.disk_cache import DiskCache
from fleetstart.prefetcher.segments.disk_image import IMAGE, DiskImage
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.base import ObjectRange, Piece
from fleetstart.prefetcher.sources.errors import SourceError
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import StoreFailed, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.weights.manifest import chunk_ranges, read_manifest
from tests.prefetcher.nodes import CHUNK_BYTES, Store, checkpoint_of
from tests.servers import wait_until

WORKER = WorkerId("w-1")
GIB = 1 << 30
Scenario = Callable[[SegmentStore], Coroutine[Any, Any, None]]


class Network(FolderSource):
    """A folder that counts as a remote store, and can be made to fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.down = False
        self.asked_bytes = 0

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        if self.down:
            raise SourceError("the network is down")
        return super().read_object(key, limit_bytes)

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        if self.down:
            raise SourceError("the network is down")
        self.asked_bytes += sum(piece.size_bytes for piece in asked.pieces)
        yield from super().read(asked, stopped)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "RESERVE_BYTES", 0)


@pytest.fixture
def network(store: Store) -> Network:
    return Network(store.folder)


def run(network: Network, folder: Path, scenario: Scenario, *, budget_bytes: int = GIB) -> None:
    """Runs a scenario with memory and disk cache as after a start of the daemon."""

    async def main() -> None:
        segments = SegmentStore(
            source=network,
            memory_bytes=GIB,
            workers_bytes=lambda: 0,
            threads=4,
            disk=DiskCache(folder, budget_bytes),
        )
        try:
            async with asyncio.timeout(60):
                await scenario(segments)
        finally:
            await segments.close()

    asyncio.run(main())


async def filled(segments: SegmentStore, checkpoint: CheckpointId) -> Segment:
    segment = await segments.acquire(checkpoint, WORKER)
    await segment.filled.wait()
    return segment


def content(segment: Segment, size_bytes: int) -> bytes:
    assert segment.error is None
    fds = [os.dup(fd) for fd in segment.descriptors()[1:]]
    return bytes(native.Region.attach(fds, size_bytes).view(0, size_bytes))


async def written(folder: Path, checkpoint: CheckpointId, chunks: int) -> None:
    """Waits until so many chunks are on the disk."""
    data = (folder / checkpoint / "manifest.json").read_bytes()
    manifest = read_manifest(data, checkpoint)
    image = DiskImage(folder / checkpoint, manifest)
    await asyncio.to_thread(
        wait_until, lambda: len(image.present(chunk_ranges(manifest))) == chunks, what="chunks on the disk"
    )


def first_start(network: Network, folder: Path, checkpoint: CheckpointId, chunks: int, **more: Any) -> None:
    async def scenario(segments: SegmentStore) -> None:
        await filled(segments, checkpoint)
        await written(folder, checkpoint, chunks)

    run(network, folder, scenario, **more)


def test_after_a_restart_weights_come_from_the_disk_without_the_store(
    network: Network, store: Store, tmp_path: Path
) -> None:
    data = os.urandom(20 * CHUNK_BYTES + 17)
    checkpoint = store.put_checkpoint(data)
    first_start(network, tmp_path / "tier", checkpoint, 21)
    network.down = True

    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, checkpoint)
        assert content(segment, len(data)) == data
        assert segment.fetch is not None
        assert segment.fetch.traffic()["disk"][0] == len(data)
        assert segments.disk_bytes == 21 * CHUNK_BYTES

    run(network, tmp_path / "tier", scenario)


@pytest.mark.parametrize("harm", ["flip", "cut", "hole"])
def test_what_the_disk_lost_comes_from_the_store_and_is_kept_again(
    network: Network, store: Store, tmp_path: Path, harm: str
) -> None:
    data = os.urandom(8 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    tier = tmp_path / "tier"
    first_start(network, tier, checkpoint, 8)
    image = tier / checkpoint / IMAGE
    if harm == "flip":
        with image.open("r+b") as file:
            file.seek(5 * CHUNK_BYTES + 3)
            file.write(bytes([data[5 * CHUNK_BYTES + 3] ^ 1]))
    elif harm == "cut":
        os.truncate(image, 5 * CHUNK_BYTES)
    else:
        with image.open("r+b") as file:
            punch_hole(file.fileno(), 5 * CHUNK_BYTES, CHUNK_BYTES)
    network.asked_bytes = 0

    async def scenario(segments: SegmentStore) -> None:
        """Memory that is given back is not written any more: the image is mended while the segment is there."""
        await filled(segments, checkpoint)
        await asyncio.to_thread(wait_until, lambda: image.read_bytes() == data, what="the image mended")

    run(network, tier, scenario)

    lost = 3 if harm == "cut" else 1
    assert network.asked_bytes == lost * CHUNK_BYTES


def punch_hole(fd: int, offset: int, size_bytes: int) -> None:
    keep_size_and_punch = 3
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(offset), ctypes.c_long(size_bytes)) == 0


def test_a_disk_that_fails_and_a_store_that_is_down_are_a_clear_error(
    network: Network, store: Store, tmp_path: Path
) -> None:
    checkpoint = store.put_checkpoint(os.urandom(4 * CHUNK_BYTES))
    first_start(network, tmp_path / "tier", checkpoint, 4)
    with (tmp_path / "tier" / checkpoint / IMAGE).open("r+b") as file:
        file.write(b"not these bytes")
    network.down = True

    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, checkpoint)
        assert isinstance(segment.error, StoreFailed)
        assert "the network is down" in segment.error.message

    run(network, tmp_path / "tier", scenario)


def test_what_is_no_image_is_removed_at_the_start(network: Network, store: Store, tmp_path: Path) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES))
    tier = tmp_path / "tier"
    first_start(network, tier, checkpoint, 1)
    (tier / checkpoint / "manifest.json").write_bytes(b"{}")
    (tier / "stray").mkdir()
    network.down = True

    async def scenario(segments: SegmentStore) -> None:
        assert not list(tier.iterdir())
        with pytest.raises(StoreFailed):
            await segments.acquire(checkpoint, WORKER)

    run(network, tier, scenario)


def test_the_least_useful_image_gives_way_and_the_budget_is_kept(
    network: Network, store: Store, tmp_path: Path
) -> None:
    one, two, three = (store.put_checkpoint(os.urandom(4 * CHUNK_BYTES)) for _ in range(3))
    tier = tmp_path / "tier"
    budget = 8 * CHUNK_BYTES
    first_start(network, tier, one, 4, budget_bytes=budget)
    first_start(network, tier, two, 4, budget_bytes=budget)
    os.utime(tier / two / "manifest.json", (1_000_000, 1_000_000))

    first_start(network, tier, three, 4, budget_bytes=budget)

    assert {path.name for path in tier.iterdir()} == {one, three}


def test_what_is_larger_than_the_budget_is_served_and_not_kept(network: Network, store: Store, tmp_path: Path) -> None:
    data = os.urandom(4 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)

    async def scenario(segments: SegmentStore) -> None:
        assert content(await filled(segments, checkpoint), len(data)) == data
        assert segments.disk_bytes == 0

    run(network, tmp_path / "tier", scenario, budget_bytes=CHUNK_BYTES)
    assert not list((tmp_path / "tier").iterdir())


@pytest.mark.parametrize("mounted", [("tmpfs", "size=1m")], indirect=True)
def test_a_disk_that_becomes_full_costs_nobody_his_weights(store: Store, mounted: Path) -> None:
    data = os.urandom(8 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)

    class Filling(Network):
        def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
            """Others fill the disk between the decision to keep the checkpoint and its first chunk."""
            if not (mounted / "others").exists():
                assert (mounted / "tier" / checkpoint).exists()
                (mounted / "others").write_bytes(bytes(shutil.disk_usage(mounted).free - 2 * CHUNK_BYTES))
            yield from super().read(asked, stopped)

    async def scenario(segments: SegmentStore) -> None:
        assert content(await filled(segments, checkpoint), len(data)) == data
        await asyncio.to_thread(wait_until, lambda: not segments.disk_bytes, what="the writer to notice")

    network = Filling(store.folder)
    network.threads = 1
    run(network, mounted / "tier", scenario)
    assert not list((mounted / "tier").iterdir())


@pytest.mark.parametrize("mounted", [("ramfs", "")], indirect=True)
def test_a_file_system_without_direct_io_is_read_and_written_all_the_same(mounted: Path) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(mounted / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    data = os.urandom(3 * CHUNK_BYTES + 5)
    manifest, _ = checkpoint_of([data], chunk_bytes=CHUNK_BYTES)
    image = DiskImage(mounted, manifest)

    for chunk in chunk_ranges(manifest):
        image.write(chunk, aligned(data[chunk.segment_offset : chunk.segment_offset + chunk.size_bytes]))

    for chunk in image.present(chunk_ranges(manifest)):
        piece = Piece(chunk.size_bytes, aligned(bytes(CHUNK_BYTES)))
        assert list(image.read([chunk], [piece], lambda: False)) == [chunk.checksum]


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 15)))
def test_an_image_has_what_was_written_to_it_and_nothing_else(tmp_path_factory: Any, indices: set[int]) -> None:
    folder = tmp_path_factory.mktemp("image")
    data = os.urandom(16 * CHUNK_BYTES)
    manifest, _ = checkpoint_of([data], chunk_bytes=CHUNK_BYTES)
    image = DiskImage(folder, manifest)
    chunks = chunk_ranges(manifest)
    for index in indices:
        begin = index * CHUNK_BYTES
        image.write(chunks[index], aligned(data[begin : begin + CHUNK_BYTES]))

    there = image.present(chunks)

    assert {chunk.index for chunk in there} == indices
    for chunk in there:
        piece = Piece(CHUNK_BYTES, aligned(bytes(CHUNK_BYTES)))
        assert list(image.read([chunk], [piece], lambda: False)) == [chunk.checksum]
    shutil.rmtree(folder)


def aligned(data: bytes) -> memoryview:
    """The bytes padded to whole pages, as a segment has them."""
    size = -(-len(data) // 4096) * 4096
    region = native.SlabPool("test", pages="small", slab_bytes=1 << (size - 1).bit_length(), capacity=1).take(size)
    view = region.view(0, size)
    view[: len(data)] = data
    return view


def test_an_image_of_another_checkpoint_is_not_taken_for_this_one(
    network: Network, store: Store, tmp_path: Path
) -> None:
    one, two = (store.put_checkpoint(os.urandom(2 * CHUNK_BYTES)) for _ in range(2))
    tier = tmp_path / "tier"
    first_start(network, tier, one, 2)
    (tier / one).rename(tier / two)
    network.down = True

    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises((StoreFailed, WeightsMissing)):
            await segments.acquire(two, WORKER)

    run(network, tier, scenario)
    wait_until(lambda: not any(thread.name == "disk-tier" for thread in threading.enumerate()))
