"""Opens a segment: reads its manifest, creates its control block, and starts its fetch from disk, peers and store.

`store` decides when to open, with which memory, and handles the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from fleetstart import native
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import checkpoint_key
from fleetstart.runtime.contract.weights.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    ChunkRange,
    Manifest,
    chunk_ranges,
    read_manifest,
)

from ..concurrency.threads import in_thread
from ..fetch.bandwidth import FetchedBytes, kind_of
from ..fetch.chunk_sources import FetchSource, StoreChunks
from ..fetch.errors import with_retries
from ..fetch.fetcher import Fetch
from ..fetch.pulls import PullPlan
from ..sources.base import Source
from ..sources.errors import ObjectMissing
from ..sources.folder import DISK_THREADS
from ..sources.throttle import BackgroundThrottle
from .disk_cache import DiskCache
from .disk_image import DiskImage
from .feeds import NO_FEED, Feed, FetchMemory, OpenPeer, SegmentFeed
from .segment import Segment

FetchCallback = Callable[[Segment, FleetError | None], None]
"""Called on the event loop when a fetch has all requested chunks, or with the error that prevented it."""


class SegmentOpener:
    """Opens segments of one source. `threads` read from a store that does not know its best number itself."""

    def __init__(
        self,
        *,
        source: Source,
        disk: DiskCache | None,
        threads: int,
        throttle: BackgroundThrottle,
        open_peer: OpenPeer | None = None,
    ) -> None:
        self._source = source
        self._open_peer = open_peer
        self._disk = disk
        self._threads = threads
        self._throttle = throttle
        self.fetched = FetchedBytes()
        self._generation = 0

    async def read_manifest(self, checkpoint: CheckpointId) -> tuple[Manifest, bytes]:
        """The manifest, parsed and as stored. Errors: WeightsMissing, CheckpointInvalid, StoreFailed."""
        kept = self._disk.manifest(checkpoint) if self._disk is not None else None

        def read() -> tuple[Manifest, bytes]:  # in a thread: a large one takes a while to check
            data = kept if kept is not None else fetch_manifest(self._source, checkpoint)
            return read_manifest(data, checkpoint), data

        return await in_thread(read, f"open-{checkpoint[:8]}")

    def start_fetch(
        self,
        segment: Segment,
        data: bytes,
        chunks: Collection[int],
        *,
        slab_bytes: int,
        in_use: set[CheckpointId],
        on_filled: FetchCallback,
        on_grown: FetchCallback,
        feed: Feed = NO_FEED,
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Creates the control block and starts fetching these chunks into the segment's memory. The disk cache keeps
        the checkpoint if it can, without evicting one in use. `rates`: bytes a second by source, in earlier fetches.
        Errors: OSError."""
        assert segment.region is not None
        assert segment.manifest is not None
        checkpoint, manifest = segment.checkpoint, segment.manifest
        self._generation += 1
        segment.control = native.ControlBlock.create(
            f"fs-{checkpoint[:12]}-control", len(manifest.chunks), data, self._generation
        )
        image = self._disk_image(checkpoint, manifest, data, in_use)
        memory = FetchMemory(weakref.ref(segment.region), slab_bytes, segment.granted)
        sources, plan = self._sources(segment, manifest, memory, image, feed, rates)
        segment.fetch = Fetch(
            checkpoint=checkpoint,
            region=segment.region,
            slab_bytes=slab_bytes,
            control=segment.control,
            sources=sources,
            plan=plan,
            on_filled=_on_loop(on_filled, segment),
            on_grown=_on_loop(on_grown, segment),
            on_chunk=self._write_behind(image, segment.region),
            throttle=self._throttle,
        )
        segment.fetch.want(chunks)

    def _disk_image(
        self, checkpoint: CheckpointId, manifest: Manifest, data: bytes, in_use: set[CheckpointId]
    ) -> DiskImage | None:
        if self._disk is None:
            return None
        if self._disk.manifest(checkpoint) is None:
            self._disk.keep(checkpoint, manifest, data, in_use)
        return self._disk.image(checkpoint)

    def _sources(
        self,
        segment: Segment,
        manifest: Manifest,
        memory: FetchMemory,
        image: DiskImage | None,
        feed: Feed,
        rates: Mapping[str, float],
    ) -> tuple[list[FetchSource], PullPlan | None]:
        """The disk for the chunks it has, peers for those they have or will have, the store for all."""
        chunks = chunk_ranges(manifest)
        there = image.present(chunks) if image is not None else []
        sources = []
        if image is not None and there:
            sources.append(FetchSource(image, there, DISK_THREADS, bytes_per_s=rates.get(image.name)))
        store = StoreChunks(self._source, segment.checkpoint, manifest)
        threads = self._source.threads or self._threads
        last = FetchSource(store, chunks, threads, costly=True, bytes_per_s=rates.get(store.name))
        if self._open_peer is None:
            return [*sources, last], None
        segment.feed = SegmentFeed(self._open_peer, memory, chunks, dict(rates))
        return segment.feed.begin(feed, sources, last)

    def _write_behind(self, image: DiskImage | None, region: native.Region) -> Callable[[ChunkRange, str], None]:
        disk, memory, fetched = self._disk, weakref.ref(region), self.fetched

        def on_chunk(chunk: ChunkRange, source: str) -> None:
            fetched.note(kind_of(source), chunk.size_bytes)
            held = memory()
            if disk is not None and image is not None and held is not None and source != image.name:
                disk.write_behind(image, chunk, held)

        return on_chunk


def fetch_manifest(source: Source, checkpoint: CheckpointId) -> bytes:
    """Reads a manifest from the source. Blocks. Errors: WeightsMissing, CheckpointInvalid, StoreFailed."""
    key = checkpoint_key(checkpoint, MANIFEST_OBJECT)
    try:
        return with_retries(lambda: source.read_object(key, MANIFEST_MAX_BYTES), f"manifest of {checkpoint[:12]}")
    except ObjectMissing as error:
        raise WeightsMissing(
            f"checkpoint {checkpoint[:12]} is not in the store: no object {key}",
            hint="deploy the function again, its weights are uploaded with it",
        ) from error
    except ValueError as error:
        raise CheckpointInvalid(str(error)) from error


def _on_loop(callback: FetchCallback, segment: Segment) -> Callable[[FleetError | None], None]:
    """A callback for the fetch's threads that runs on the event loop."""
    loop = asyncio.get_running_loop()

    def call(error: FleetError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(callback, segment, error)

    return call
