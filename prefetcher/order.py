"""In which order a source's chunks are fetched: plain values, no threads, no bytes.

Chunks lie in the order in which layers run, and are taken in it. Whoever needs others sooner moves them to the
front: a stage its own layers, a worker the tensor that it waits for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from fleetstart.runtime.contract.manifest import ChunkRange


class FetchOrder:
    """The chunks that nobody fetches yet."""

    def __init__(self, chunks: Iterable[ChunkRange]) -> None:
        self._pending = OrderedDict((chunk.index, chunk) for chunk in chunks)

    def __len__(self) -> int:
        return len(self._pending)

    def first(self, indices: Iterable[int]) -> None:
        """These before all others, in the order given; those that are under way or there are left out."""
        for index in reversed(list(indices)):
            if index in self._pending:
                self._pending.move_to_end(index, last=False)

    def put_back(self, chunks: Iterable[ChunkRange]) -> None:
        """They are wanted again, and next."""
        for chunk in reversed(list(chunks)):
            self._pending[chunk.index] = chunk
            self._pending.move_to_end(chunk.index, last=False)

    def next_run(self, most: int) -> list[ChunkRange]:
        """Takes the next chunk and those after it, up to `most`, that lie behind it in the same object."""
        run: list[ChunkRange] = []
        while self._pending and len(run) < most:
            chunk = next(iter(self._pending.values()))
            if run and not _follows(run[-1], chunk):
                break
            del self._pending[chunk.index]
            run.append(chunk)
        return run


def _follows(chunk: ChunkRange, other: ChunkRange) -> bool:
    return other.object == chunk.object and other.object_offset == chunk.object_offset + chunk.size_bytes


def run_length(most: int, pending: int, threads: int) -> int:
    """Chunks to ask for at once: long runs cost fewer requests, short ones at the end keep every thread busy."""
    return max(1, min(most, pending // (2 * threads)))
