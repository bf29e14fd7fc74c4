"""In which order a source's chunks are fetched: plain values, no threads, no bytes.

Chunks lie in the order in which layers run, and are taken in it. Those that somebody wants come first: of a stage
those of its layers, and nothing else (HydraServe section 4.1). Whoever needs some sooner moves them to the front.
The rest is for those who have time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from fleetstart.runtime.contract.weights.manifest import ChunkRange

SHORT_BYTES = 4 * 1024 * 1024
"""Shorter than that only when there is less for each: every request has its price."""


class FetchOrder:
    """The chunks that nobody fetches yet: those that are wanted, and the rest."""

    def __init__(self, chunks: Iterable[ChunkRange]) -> None:
        self._background = OrderedDict((chunk.index, chunk) for chunk in chunks)
        self._pending: OrderedDict[int, ChunkRange] = OrderedDict()
        self._wanted: set[int] = set()
        """Also of chunks that are under way, or that another source has for now."""
        self.pending_bytes = 0
        """Of those that are wanted."""

    def __len__(self) -> int:
        """How many of those that are wanted."""
        return len(self._pending)

    @property
    def background_count(self) -> int:
        return len(self._background)

    def want(self, indices: Iterable[int]) -> None:
        """These too, behind those that are wanted already."""
        for index in indices:
            self._wanted.add(index)
            if (chunk := self._background.pop(index, None)) is not None:
                self._pending[index] = chunk
                self.pending_bytes += chunk.size_bytes

    def prioritize(self, indices: Iterable[int]) -> None:
        """Of those that are wanted these before all others, in the order given."""
        for index in reversed(list(indices)):
            if index in self._pending:
                self._pending.move_to_end(index, last=False)

    def put_back(self, chunks: Iterable[ChunkRange]) -> None:
        """They are next among their like."""
        for chunk in reversed(list(chunks)):
            wanted = chunk.index in self._wanted
            order = self._pending if wanted else self._background
            order[chunk.index] = chunk
            order.move_to_end(chunk.index, last=False)
            self.pending_bytes += chunk.size_bytes if wanted else 0

    def next_run(self, most_bytes: int) -> list[ChunkRange]:
        """Takes the next chunk that is wanted, and those behind it in the same object, up to `most_bytes` together."""
        run = _run(self._pending, most_bytes)
        self.pending_bytes -= sum(chunk.size_bytes for chunk in run)
        return run

    def next_background_run(self, most_bytes: int) -> list[ChunkRange]:
        """The same of the rest."""
        return _run(self._background, most_bytes)


def _run(order: OrderedDict[int, ChunkRange], most_bytes: int) -> list[ChunkRange]:
    run: list[ChunkRange] = []
    size_bytes = 0
    while order:
        chunk = next(iter(order.values()))
        if run and (size_bytes + chunk.size_bytes > most_bytes or not _follows(run[-1], chunk)):
            break
        del order[chunk.index]
        run.append(chunk)
        size_bytes += chunk.size_bytes
    return run


def _follows(chunk: ChunkRange, other: ChunkRange) -> bool:
    return other.object == chunk.object and other.object_offset == chunk.object_offset + chunk.size_bytes


def run_length(most_bytes: int, pending_bytes: int, threads: int) -> int:
    """Bytes to ask for at once: long runs cost fewer requests, short ones at the end keep every thread busy."""
    share_bytes = pending_bytes // threads
    return max(1, min(most_bytes, max(share_bytes // 2, min(SHORT_BYTES, share_bytes))))


def ranges_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """(begin, end) of the stretches of ascending numbers."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
