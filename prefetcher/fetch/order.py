"""Fetch order of one source's chunks. Pure: no threads, no bytes.

Chunks lie in the order in which layers run, and are fetched in it. Wanted chunks come first: those of a stage's
layers, and nothing else (HydraServe section 4.1). A worker that waits for some moves them to the front. The others
are for background reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from fleetstart.runtime.contract.weights.manifest import ChunkRange

SHORT_BYTES = 4 * 1024 * 1024
"""Runs are at least that long unless there is less for each thread: every request has its price."""


class FetchOrder:
    """Two queues of chunks that no thread is fetching: wanted and background."""

    def __init__(self, chunks: Iterable[ChunkRange]) -> None:
        self._background = OrderedDict((chunk.index, chunk) for chunk in chunks)
        self._pending: OrderedDict[int, ChunkRange] = OrderedDict()
        self._wanted: set[int] = set()
        """Wanted chunks, including those being fetched or waiting in another source."""
        self.pending_bytes = 0
        """Bytes in the wanted queue."""

    def __len__(self) -> int:
        """Length of the wanted queue."""
        return len(self._pending)

    @property
    def background_count(self) -> int:
        return len(self._background)

    def want(self, indices: Iterable[int]) -> None:
        """Appends chunks to the wanted queue."""
        for index in indices:
            self._wanted.add(index)
            if (chunk := self._background.pop(index, None)) is not None:
                self._pending[index] = chunk
                self.pending_bytes += chunk.size_bytes

    def prioritize(self, indices: Iterable[int]) -> None:
        """Moves those of the chunks that are in the wanted queue to its front, in the order given."""
        for index in reversed(list(indices)):
            if index in self._pending:
                self._pending.move_to_end(index, last=False)

    def pending(self) -> Iterator[ChunkRange]:
        """The wanted queue, the next first."""
        return iter(self._pending.values())

    def background(self) -> Iterator[ChunkRange]:
        return iter(self._background.values())

    def __contains__(self, index: int) -> bool:
        return index in self._pending or index in self._background

    def remove(self, indices: Iterable[int]) -> None:
        """Takes chunks out: another source reads them, or is the only one that may."""
        for index in indices:
            if (chunk := self._pending.pop(index, None)) is not None:
                self.pending_bytes -= chunk.size_bytes
            self._background.pop(index, None)

    def append(self, chunks: Iterable[ChunkRange]) -> None:
        """Puts chunks at the end of their queue, wanted or background."""
        for chunk in chunks:
            wanted = chunk.index in self._wanted
            order = self._pending if wanted else self._background
            self.pending_bytes += chunk.size_bytes if wanted and chunk.index not in order else 0
            order[chunk.index] = chunk

    def put_back(self, chunks: Iterable[ChunkRange]) -> None:
        """Puts the chunks back at the front of their queue, wanted or background."""
        for chunk in reversed(list(chunks)):
            wanted = chunk.index in self._wanted
            order = self._pending if wanted else self._background
            self.pending_bytes += chunk.size_bytes if wanted and chunk.index not in order else 0
            order[chunk.index] = chunk
            order.move_to_end(chunk.index, last=False)

    def next_run(self, most_bytes: int, first: int | None = None) -> list[ChunkRange]:
        """Takes a wanted chunk, by default the next, and those behind it in the same object, up to `most_bytes`
        together."""
        run = _run(self._pending, most_bytes, first)
        self.pending_bytes -= sum(chunk.size_bytes for chunk in run)
        return run

    def next_background_run(self, most_bytes: int, first: int | None = None) -> list[ChunkRange]:
        """Takes a run of background chunks, as `next_run` does."""
        return _run(self._background, most_bytes, first)


def _run(order: OrderedDict[int, ChunkRange], most_bytes: int, first: int | None) -> list[ChunkRange]:
    run: list[ChunkRange] = []
    size_bytes = 0
    index = first
    while order and (index is None or index in order):
        chunk = order[index] if index is not None else next(iter(order.values()))
        if run and (size_bytes + chunk.size_bytes > most_bytes or not _follows(run[-1], chunk)):
            break
        del order[chunk.index]
        run.append(chunk)
        size_bytes += chunk.size_bytes
        index = index + 1 if index is not None else None
    return run


def _follows(chunk: ChunkRange, other: ChunkRange) -> bool:
    return other.object == chunk.object and other.object_offset == chunk.object_offset + chunk.size_bytes


def run_length(most_bytes: int, pending_bytes: int, threads: int) -> int:
    """Bytes to request at once: long runs cost fewer requests, short ones at the end keep every thread busy."""
    share_bytes = pending_bytes // threads
    return max(1, min(most_bytes, max(share_bytes // 2, min(SHORT_BYTES, share_bytes))))


def ranges_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """(begin, end) of the runs of consecutive numbers. `indices` ascend."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
