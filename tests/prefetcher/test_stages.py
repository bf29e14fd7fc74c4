"""Segments that hold a stage, and grow: what is fetched and what is not, what it takes, and whom a failure concerns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart import native
from fleetstart.prefetcher import fetch
from fleetstart.prefetcher.disk import DiskTier
from fleetstart.prefetcher.memory import slab_size
from fleetstart.prefetcher.segments import Segment, Segments
from fleetstart.prefetcher.sources import Abandoned, FileSource, Range, Source, SourceError
from fleetstart.runtime.contract.errors import FleetError, StoreFailed, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.manifest import (
    Manifest,
    Part,
    TensorEntry,
    checkpoint_id,
    manifest_bytes,
    read_manifest,
)
from fleetstart.runtime.contract.messages import SegmentReport
from fleetstart.runtime.contract.stage import stage_chunks
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.servers import wait_until

ONE, TWO, THREE = WorkerId("w-1"), WorkerId("w-2"), WorkerId("w-3")
SLAB_BYTES = slab_size(1 << 30)
LAYERS = 8
LAYER_CHUNKS = 3
Scenario = Callable[[Segments], Coroutine[Any, Any, None]]


class Model:
    """An embedding of a chunk, then layers of a whole number of chunks, in a store."""

    def __init__(self, store: Store, *, layer_chunks: int = LAYER_CHUNKS, layers: int = LAYERS) -> None:
        sizes = [CHUNK_BYTES, *[layer_chunks * CHUNK_BYTES] * layers]
        self.data = os.urandom(sum(sizes))
        tensors, offset = {}, 0
        for number, size in enumerate(sizes):
            name = f"layers.{number - 1}.w" if number else "embed"
            tensors[name] = TensorEntry(offset, size, "U8", (size,), number - 1)
            offset += size
        pieces = [self.data[at : at + CHUNK_BYTES] for at in range(0, len(self.data), CHUNK_BYTES)]
        self.manifest = Manifest(
            chunk_bytes=CHUNK_BYTES,
            total_bytes=len(self.data),
            parts=[Part(object="part", header_bytes=4096, data_bytes=len(self.data), segment_offset=0)],
            chunks=[native.xxh3(piece) for piece in pieces],
            tensors=tensors,
        )
        encoded = manifest_bytes(self.manifest)
        self.checkpoint: CheckpointId = checkpoint_id(encoded)
        store.put(f"checkpoints/{self.checkpoint}/manifest.json", encoded)
        store.put(f"checkpoints/{self.checkpoint}/part", bytes(4096) + self.data)
        self.path = store.path(f"checkpoints/{self.checkpoint}/part")

    def chunks(self, first: int, end: int) -> set[int]:
        return set(stage_chunks(self.manifest, first, end))

    @property
    def everything(self) -> set[int]:
        return set(range(len(self.manifest.chunks)))


class Gated(FileSource):
    """Counts what it gives, and breaks, or waits at a gate, when it is told to. Chunks come one by one."""

    run_bytes = 1
    threads = 4

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given: list[int] = []
        self.paced: set[int] = set()
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0
        self.lock = threading.Lock()

    def read(self, asked: Range, stopped: Callable[[], bool]) -> Iterator[int]:
        chunk = (asked.offset - 4096) // CHUNK_BYTES
        with self.lock:
            self.waiting += 1
        try:
            while not self.gate.wait(0.01):
                if stopped():
                    raise Abandoned(asked.key)
        finally:
            with self.lock:
                self.waiting -= 1
        if self.broken:
            raise SourceError("the store is gone")
        for number, checksum in enumerate(super().read(asked, stopped)):
            self.given.append(chunk + number)
            if asked.pace is not None:
                self.paced.add(chunk + number)
            yield checksum


@pytest.fixture
def model(store: Store) -> Model:
    return Model(store)


@pytest.fixture
def gated(store: Store, monkeypatch: pytest.MonkeyPatch) -> Gated:
    monkeypatch.setattr(fetch, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))
    return Gated(store.folder)


def run(source: Source, scenario: Scenario, *, memory_bytes: int = 1 << 30, disk: DiskTier | None = None) -> None:
    async def main() -> None:
        segments = Segments(source=source, memory_bytes=memory_bytes, workers_bytes=lambda: 0, threads=4, disk=disk)
        try:
            async with asyncio.timeout(60):
                await scenario(segments)
        finally:
            await segments.close()

    asyncio.run(main())
    wait_until(lambda: not any(thread.name.startswith("store-") for thread in threading.enumerate()))


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what=what)


def there(report: SegmentReport) -> set[int]:
    return {chunk for begin, end in report.ranges for chunk in range(begin, end)}


def state(segment: Segment) -> str:
    return segment.state


def right(segment: Segment, model: Model, chunks: set[int]) -> bool:
    """What a worker sees of them, that attached when it began."""
    fds = [os.dup(fd) for fd in segment.descriptors()[1:]]
    region = native.Region.attach(fds, len(model.data))
    return all(
        region.view(chunk * CHUNK_BYTES, CHUNK_BYTES) == model.data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        for chunk in chunks
    )


# ── what is fetched ────────────────────────────────────────────────────────────────────────────────


def test_a_stage_gets_its_chunks_and_no_others(model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        assert state(segment) == "filling"
        gated.gate.set()
        await segment.filled.wait()

        assert segment.error is None
        assert state(segment) == "partial"
        assert there(segment.report()) == model.chunks(2, 4)
        assert segment.report().ready_bytes == len(model.chunks(2, 4)) * CHUNK_BYTES
        assert segments.is_ready(model.checkpoint, (2, 4))
        assert segments.is_ready(model.checkpoint, (2, 3))
        assert not segments.is_ready(model.checkpoint, (1, 4))
        assert not segments.is_ready(model.checkpoint)
        assert segment.fetch_span_ns[1] > segment.fetch_span_ns[0]
        assert right(segment, model, model.chunks(2, 4))

    run(gated, scenario)

    assert sorted(gated.given) == sorted(model.chunks(2, 4))
    assert not gated.paced


def test_two_stages_of_one_checkpoint_share_a_segment_that_has_what_either_needs(model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: Segments) -> None:
        one = await segments.acquire(model.checkpoint, ONE, (0, 2))
        two = await segments.acquire(model.checkpoint, TWO, (4, 6))
        assert one is two
        assert one.state == "filling"
        gated.gate.set()
        await one.filled.wait()
        assert there(one.report()) == model.chunks(0, 2) | model.chunks(4, 6)
        assert one.pins == {ONE, TWO}

        segments.release(one, ONE)
        again = await segments.acquire(model.checkpoint, THREE, (5, 6))
        assert again.filled.is_set(), "it was there"

    run(gated, scenario)

    assert len(gated.given) == len(set(gated.given))


def test_a_whole_worker_has_the_rest_fetched_and_waits_for_it(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        await segment.filled.wait()
        span = segment.fetch_span_ns
        gated.gate.clear()

        assert await segments.acquire(model.checkpoint, TWO) is segment
        assert state(segment) == "filling"
        assert segment.fetch_span_ns[0] >= span[1]
        assert segment.fetch_span_ns[1] == 0
        gated.gate.set()
        await segment.filled.wait()
        assert state(segment) == "ready"
        assert segments.is_ready(model.checkpoint)
        assert segments.reports()[0].ranges == [(0, len(model.everything))]
        assert right(segment, model, model.everything)

    run(gated, scenario)

    assert sorted(gated.given) == sorted(model.everything)
    assert not gated.paced


def test_a_stage_s_adapter_comes_whole(store: Store, gated: Gated, model: Model) -> None:
    adapter = Model(store, layers=2)

    async def scenario(segments: Segments) -> None:
        weights, other = await segments.acquire_all([model.checkpoint, adapter.checkpoint], ONE, (0, 1))
        await asyncio.gather(weights.filled.wait(), other.filled.wait())
        assert (weights.state, other.state) == ("partial", "ready")

    run(gated, scenario)


LAYERS_OF_STAGE = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).filter(lambda cut: cut[0] < cut[1])


@settings(max_examples=15, deadline=None)
@given(asked=st.lists(st.one_of(st.none(), LAYERS_OF_STAGE), min_size=1, max_size=4), grows=st.booleans())
def test_whoever_asks_for_what_everyone_has_it_and_each_chunk_comes_once(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, int] | None], grows: bool
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    model, gated = Model(store), Gated(store.folder)

    async def scenario(segments: Segments) -> None:
        workers = [WorkerId(f"w-{number}") for number in range(len(asked))]
        held = await asyncio.gather(
            *(segments.acquire(model.checkpoint, worker, stage) for worker, stage in zip(workers, asked, strict=True))
        )
        segment = held[0]
        growth = asyncio.ensure_future(segments.grow(segment)) if grows else None
        await segment.filled.wait()
        for stage in asked:
            assert segments.is_ready(model.checkpoint, stage)
        if growth is not None:
            await growth
        needed = set().union(*(set(segment.needed(stage)) for stage in asked))
        assert there(segment.report()) == (model.everything if grows else needed)
        assert right(segment, model, there(segment.report()))
        for worker in workers:
            segments.release(segment, worker)

    run(gated, scenario)
    assert len(gated.given) == len(set(gated.given))


# ── growing ────────────────────────────────────────────────────────────────────────────────────────


def test_what_grows_comes_after_the_stage_and_at_a_pace(model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        growth = asyncio.create_task(segments.grow(segment))
        gated.gate.set()
        await segment.filled.wait()
        span = segment.fetch_span_ns
        await growth
        assert state(segment) == "ready"
        assert segment.fetch_span_ns == span, "the stage's alone"
        assert right(segment, model, model.everything)
        await segments.grow(segment)

    run(gated, scenario)

    stage = model.chunks(2, 4)
    assert set(gated.given[: len(stage)]) == stage
    assert sorted(gated.given) == sorted(model.everything)
    assert gated.paced == model.everything - stage


def test_one_connection_is_used_behind_the_workers_back(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 1))
        await segment.filled.wait()
        gated.gate.clear()
        growth = asyncio.create_task(segments.grow(segment))
        await until(lambda: gated.waiting == 1, "a read")
        assert sum(thread.name.startswith("store-") for thread in threading.enumerate()) == 1
        gated.gate.set()
        await growth

    run(gated, scenario)


def test_what_a_worker_waits_for_comes_at_full_speed_though_nobody_had_asked_for_it(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 1))
        await segment.filled.wait()
        wanted = sorted(model.chunks(6, 7))
        gated.gate.clear()
        segments.first(segment, wanted[0], wanted[-1])
        assert state(segment) == "filling"
        gated.gate.set()
        await segment.filled.wait()
        assert there(segment.report()) == model.chunks(0, 1) | set(wanted)
        segments.first(segment, -5, 10_000)
        await segment.filled.wait()
        assert state(segment) == "ready"

    run(gated, scenario)
    assert not gated.paced


def test_in_a_hurry_the_whole_rest_comes_at_full_speed_also_what_was_growing(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 1))
        await segment.filled.wait()
        gated.gate.clear()
        growth = asyncio.create_task(segments.grow(segment))
        await until(lambda: gated.waiting == 1, "a read")
        segments.hurry(segment)
        assert state(segment) == "filling"
        await until(lambda: gated.waiting == 4, "all threads")
        gated.gate.set()
        await segment.filled.wait()
        await growth
        assert state(segment) == "ready"
        assert right(segment, model, model.everything)

    run(gated, scenario)
    assert len(gated.paced) == 1
    assert len(gated.given) == len(set(gated.given))


def test_growth_ends_with_the_last_who_waits_for_it_and_goes_on_with_the_next(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 1))
        await segment.filled.wait()
        gated.gate.clear()
        growths = [asyncio.create_task(segments.grow(segment)) for _ in range(2)]
        await until(lambda: gated.waiting == 1, "a read")
        growths[0].cancel()
        await asyncio.gather(growths[0], return_exceptions=True)
        assert not growths[1].done()
        growths[1].cancel()
        await asyncio.gather(growths[1], return_exceptions=True)
        await until(lambda: not any(t.name.startswith("store-") for t in threading.enumerate()), "the threads' end")
        gated.gate.set()
        assert state(segment) == "partial"
        assert there(segment.report()) == model.chunks(0, 1)
        await segments.grow(segment)
        assert state(segment) == "ready"

    run(gated, scenario)


# ── faults ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_dies_behind_the_workers_back_ends_the_growth_and_nothing_else(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        await segment.filled.wait()
        gated.broken = True

        with pytest.raises(StoreFailed, match="4 times"):
            await segments.grow(segment)

        assert segment.error is None
        assert state(segment) == "partial"
        assert segment.control is not None
        assert segment.control.state == "filling"
        assert right(segment, model, model.chunks(2, 4))
        with pytest.raises(StoreFailed):
            await segments.grow(segment)
        gated.broken = False
        await segments.grow(segment)
        assert state(segment) == "ready"
        assert right(segment, model, model.everything)

    run(gated, scenario)


def test_what_somebody_waits_for_and_cannot_have_fails_the_segment_and_the_growth(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        await segment.filled.wait()
        gated.gate.clear()
        growth = asyncio.create_task(segments.grow(segment))
        await until(lambda: gated.waiting == 1, "a read")
        gated.broken = True
        segments.hurry(segment)
        gated.gate.set()

        with pytest.raises(StoreFailed):
            await growth
        await segment.filled.wait()
        assert isinstance(segment.error, StoreFailed)
        assert segment.control is not None
        with pytest.raises(native.SegmentFailed):
            segment.control.wait(0, 0, 5.0)
        assert all(segment.control.is_ready(chunk) for chunk in model.chunks(2, 4)), "who has it, keeps it"
        with pytest.raises(StoreFailed):
            await segments.grow(segment)

        gated.broken = False
        fresh = await segments.acquire(model.checkpoint, TWO, (2, 4))
        assert fresh is not segment
        await fresh.filled.wait()
        assert fresh.error is None
        segments.release(segment, ONE)

    run(gated, scenario)


def test_a_second_stage_that_cannot_come_leaves_the_first_what_it_has(model: Model, gated: Gated) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 2))
        await segment.filled.wait()
        gated.broken = True
        await segments.acquire(model.checkpoint, TWO, (4, 5))
        await segment.filled.wait()
        assert state(segment) == "failed"
        assert right(segment, model, model.chunks(0, 2))

    run(gated, scenario)


def test_a_damaged_chunk_that_nobody_wants_harms_nobody(model: Model, gated: Gated) -> None:
    data = bytearray(model.path.read_bytes())
    data[-1] ^= 1
    model.path.write_bytes(data)

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        await segment.filled.wait()
        assert segment.error is None
        with pytest.raises(FleetError, match="checksum"):
            await segments.grow(segment)
        assert state(segment) == "partial"

    run(gated, scenario)


def test_who_is_gone_while_it_grows_leaves_memory_that_gives_way(store: Store, model: Model, gated: Gated) -> None:
    other = Model(store)

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 1))
        await segment.filled.wait()
        gated.gate.clear()
        growth = asyncio.create_task(segments.grow(segment))
        await until(lambda: gated.waiting == 1, "a read")
        segments.release(segment, ONE)
        with pytest.raises(Unavailable, match="nobody uses"):
            await growth
        gated.gate.set()
        await until(lambda: not any(t.name.startswith("store-") for t in threading.enumerate()), "the threads' end")

        assert state(segment) == "partial"
        taken = await segments.acquire(other.checkpoint, TWO)
        await taken.filled.wait()
        assert segments.evictions == 1
        assert segments.used_bytes == segments.memory.used_bytes == SLAB_BYTES

    run(gated, scenario, memory_bytes=SLAB_BYTES)


def test_closing_ends_a_growth(model: Model, gated: Gated) -> None:
    growths: list[asyncio.Task[None]] = []

    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (0, 1))
        await segment.filled.wait()
        gated.gate.clear()
        growths.append(asyncio.create_task(segments.grow(segment)))
        await until(lambda: gated.waiting == 1, "a read")
        await segments.close()
        with pytest.raises(Unavailable, match="abandoned"):
            await growths[0]

    run(gated, scenario)


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def large(store: Store) -> Model:
    """A slab a layer, as nearly as it goes."""
    return Model(store, layers=3, layer_chunks=SLAB_BYTES // CHUNK_BYTES)


def test_a_stage_takes_memory_for_its_own_chunks_alone(large: Model, store: Store) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(large.checkpoint, ONE, (2, 3))
        await segment.filled.wait()
        assert segments.used_bytes == segments.memory.used_bytes == 2 * SLAB_BYTES, "a layer lies across two slabs"
        assert segment.report().size_bytes == len(large.data)
        assert len(segment.descriptors()) == 1 + 4
        assert right(segment, large, large.chunks(2, 3))

    run(FileSource(store.folder), scenario, memory_bytes=2 * SLAB_BYTES)


def test_what_cannot_grow_for_lack_of_memory_says_so_and_goes_on_as_it_is(large: Model, store: Store) -> None:
    async def scenario(segments: Segments) -> None:
        segment = await segments.acquire(large.checkpoint, ONE, (2, 3))
        await segment.filled.wait()
        for attempt in (segments.grow(segment), segments.acquire(large.checkpoint, TWO)):
            with pytest.raises(Unavailable) as caught:
                await attempt
            assert f"{2 * SLAB_BYTES:,} bytes; of the node's {3 * SLAB_BYTES:,}" in caught.value.message
        with pytest.raises(Unavailable):
            segments.hurry(segment)
        assert segments.used_bytes == 2 * SLAB_BYTES
        assert state(segment) == "partial"
        assert segment.pins == {ONE}

        segments.first(segment, 0, 0)
        await segment.filled.wait()
        assert there(segment.report()) == large.chunks(2, 3) | {0}
        segments.first(segment, 0, len(large.everything))
        await until(lambda: segment.state == "failed", "the segment's failure")
        assert isinstance(segment.error, Unavailable), "who waits for it is told"
        assert right(segment, large, large.chunks(2, 3))

    run(FileSource(store.folder), scenario, memory_bytes=3 * SLAB_BYTES)


def test_growth_makes_room_and_its_bytes_appear_where_workers_attached(store: Store, large: Model) -> None:
    unused = Model(store, layers=2, layer_chunks=SLAB_BYTES // CHUNK_BYTES)

    async def scenario(segments: Segments) -> None:
        before = await segments.acquire(unused.checkpoint, TWO, (1, 2))
        await before.filled.wait()
        segments.release(before, TWO)
        segment = await segments.acquire(large.checkpoint, ONE, (2, 3))
        fds = [os.dup(fd) for fd in segment.descriptors()[1:]]
        region = native.Region.attach(fds, len(large.data))
        control = native.ControlBlock.attach(os.dup(segment.descriptors()[0]))
        await segments.grow(segment)
        control.wait(0, control.chunk_count - 1, 1.0)
        assert bytes(region.view(0, len(large.data))) == large.data
        assert segments.evictions == 1
        assert segments.used_bytes == segments.memory.used_bytes == 4 * SLAB_BYTES

    run(FileSource(store.folder), scenario, memory_bytes=5 * SLAB_BYTES)


# ── the disk ───────────────────────────────────────────────────────────────────────────────────────


def test_a_stage_is_kept_on_the_disk_and_what_is_told_of_it_is_true(
    model: Model, gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetstart.prefetcher.disk.RESERVE_BYTES", 0)
    stage = model.chunks(2, 4)
    expected = [(min(stage), max(stage) + 1)]

    async def first(segments: Segments) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        await segment.filled.wait()
        await until(lambda: segments.disk_ranges() == {model.checkpoint: expected}, "the chunks on the disk")

    async def second(segments: Segments) -> None:
        assert segments.disk_ranges() == {model.checkpoint: expected}
        gated.given.clear()
        segment = await segments.acquire(model.checkpoint, ONE, (3, 5))
        await segments.grow(segment)
        assert right(segment, model, model.everything)
        assert set(gated.given) == model.everything - stage
        whole = [(0, len(model.everything))]
        await until(lambda: segments.disk_ranges() == {model.checkpoint: whole}, "all of it on the disk")

    run(gated, first, disk=DiskTier(tmp_path / "tier", 1 << 30))
    run(gated, second, disk=DiskTier(tmp_path / "tier", 1 << 30))
    assert read_manifest((tmp_path / "tier" / model.checkpoint / "manifest.json").read_bytes()) == model.manifest
