"""Chunk sources of a fetch, and the buffers in memory that chunks are read into.

The node's disk and peers have some chunks of a checkpoint, the store has all. `progress` decides which source reads
which chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from fleetstart import native
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import checkpoint_key
from fleetstart.runtime.contract.weights.manifest import ChunkRange, Manifest

from ..sources.base import PAGE_BYTES, ObjectRange, Piece, Source
from ..sources.throttle import BackgroundThrottle

PATIENCE_S = 2.0
"""A disk or a store that was not broken has always answered by then."""


class ChunkSource(Protocol):
    """A source of one checkpoint's chunks. Thread-safe. Errors: as of `Source.read`."""

    name: str
    run_bytes: int

    def read(
        self,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None = None,
    ) -> Iterator[int]:
        """Fills the pieces with consecutive chunks and yields the checksum of each."""
        ...


class StoreChunks:
    """The object store as a source of all chunks."""

    name = "store"

    def __init__(self, source: Source, checkpoint: CheckpointId, manifest: Manifest) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._object_bytes = {part.object: part.header_bytes + part.data_bytes for part in manifest.parts}
        self.run_bytes = source.run_bytes

    def read(
        self,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None = None,
    ) -> Iterator[int]:
        first = run[0]
        key = checkpoint_key(self._checkpoint, first.object)
        asked = ObjectRange(key, self._object_bytes[first.object], first.object_offset, pieces, throttle)
        return self._source.read(asked, stopped)


@dataclass(frozen=True, slots=True)
class FetchSource:
    """A chunk source, the chunks to fetch from it, and its number of threads."""

    source: ChunkSource
    chunks: Sequence[ChunkRange]
    """Those that it has, or will have when they are asked for."""
    threads: int
    costly: bool = False
    """True if others that are nearly as quick deliver what they have: so is the object store."""
    spare: bool = False
    """True if the fetch does without it once it has failed twice: so is a peer."""
    patience_s: float = PATIENCE_S
    """Time for a chunk that another source could deliver, before the other takes it."""
    bytes_per_s: float | None = None
    """Its rate in earlier fetches."""


def pieces_in(region: native.Region, slab_bytes: int, chunks: Sequence[ChunkRange]) -> list[Piece]:
    """Buffers for consecutive chunks. Populates their pages now, so that lack of memory is an OSError and not a signal.

    Chunks in one slab share one view, because a view costs as much as some of the bytes of a small chunk.
    """
    pieces: list[Piece] = []
    for _, group in groupby(chunks, lambda chunk: chunk.segment_offset // slab_bytes):
        together = list(group)
        begin, last = together[0].segment_offset, together[-1]
        size_bytes = last.segment_offset - begin + _pages(last.size_bytes)
        region.populate(begin, size_bytes)
        view = region.view(begin, size_bytes)
        for chunk in together:
            at = chunk.segment_offset - begin
            pieces.append(Piece(chunk.size_bytes, view[at : at + _pages(chunk.size_bytes)]))
    return pieces


def _pages(size_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
