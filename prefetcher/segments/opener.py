"""Opens a segment: reads its manifest, creates its control block, and starts its fetch from disk cache and store.

`store` decides when to open, with which memory, and handles the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Collection

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
from ..fetch.bandwidth import FetchedBytes
from ..fetch.chunk_sources import FetchSource, StoreChunks
from ..fetch.errors import with_retries
from ..fetch.fetcher import Fetch
from ..sources.base import Source
from ..sources.errors import ObjectMissing
from ..sources.folder import DISK_THREADS
from ..sources.throttle import BackgroundThrottle
from .disk_cache import DiskCache, DiskImage
from .segment import Segment

FetchCallback = Callable[[Segment, FleetError | None], None]
"""Called on the event loop when a fetch has all requested chunks, or with the error that prevented it."""


class SegmentOpener:
    """Opens segments of one source. `threads` read from a store that does not know its best number itself."""

    def __init__(self, *, source: Source, disk: DiskCache | None, threads: int, throttle: BackgroundThrottle) -> None:
        self._source = source
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
    ) -> None:
        """Creates the control block and starts fetching these chunks into the segment's memory. The disk cache keeps
        the checkpoint if it can, without evicting one in use. Errors: OSError."""
        assert segment.region is not None
        assert segment.manifest is not None
        checkpoint, manifest = segment.checkpoint, segment.manifest
        self._generation += 1
        segment.control = native.ControlBlock.create(
            f"fs-{checkpoint[:12]}-control", len(manifest.chunks), data, self._generation
        )
        image = self._disk_image(checkpoint, manifest, data, in_use)
        segment.fetch = Fetch(
            checkpoint=checkpoint,
            region=segment.region,
            slab_bytes=slab_bytes,
            control=segment.control,
            sources=self._sources(checkpoint, manifest, image),
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

    def _sources(self, checkpoint: CheckpointId, manifest: Manifest, image: DiskImage | None) -> list[FetchSource]:
        """The disk for the chunks it has, the store for the rest and for chunks that turn out to be corrupt on the
        disk."""
        chunks = chunk_ranges(manifest)
        there = image.present(chunks) if image is not None else []
        indices = {chunk.index for chunk in there}
        elsewhere = [chunk for chunk in chunks if chunk.index not in indices]
        store = StoreChunks(self._source, checkpoint, manifest)
        sources = [FetchSource(store, elsewhere, self._source.threads or self._threads)]
        if image is not None and there:
            sources.insert(0, FetchSource(image, there, DISK_THREADS))
        return sources

    def _write_behind(self, image: DiskImage | None, region: native.Region) -> Callable[[ChunkRange, str], None]:
        disk, memory, fetched = self._disk, weakref.ref(region), self.fetched

        def on_chunk(chunk: ChunkRange, source: str) -> None:
            fetched.note(source, chunk.size_bytes)
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
