"""Order of copies to a device, and the place of each chunk there: pure decisions, without device or threads.

The device gets one allocation with a slot for each chunk, in the segment's order, so a tensor's chunks are adjacent
there as in the segment. Chunks move in pieces: as many adjacent ready chunks as the device moves at a time, so a slow
segment moves chunk by chunk and a full one in large copies (ServerlessLLM section 4.2 has chunks of one size). Chunks
that a reader waits for move before the rest; chunks that are not ready delay no others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

LOOKAHEAD_CHUNKS = 256
"""Chunks that are searched for a ready one: a source has fewer ranges than that in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPiece:
    """One copy: `count` chunks starting at `chunk`, to slots starting at `slot`."""

    chunk: int
    count: int
    slot: int
    urgent: bool

    @property
    def chunks(self) -> range:
        return range(self.chunk, self.chunk + self.count)

    def parts(self, at_most: int) -> Iterator[CopyPiece]:
        """The piece, cut into some of `at_most` chunks."""
        for first in range(0, self.count, at_most):
            count = min(at_most, self.count - first)
            yield CopyPiece(chunk=self.chunk + first, count=count, slot=self.slot + first, urgent=self.urgent)


class TransferPlan:
    """State of each chunk of a transfer: waiting, moving, moved. Not thread-safe: its owner has a lock."""

    def __init__(self, chunks: Iterable[int], *, first: Iterable[int] = ()) -> None:
        """`chunks`: all that move; `first`: the urgent ones of them, in their order."""
        wanted = sorted(set(chunks))
        self._slots = {chunk: slot for slot, chunk in enumerate(wanted)}
        # OrderedDict, a linked list: a plain dict scans for its first key over all removed ones.
        self._rest = OrderedDict.fromkeys(wanted)
        self._urgent: OrderedDict[int, None] = OrderedDict()
        self._moving: set[int] = set()
        self.demand(first)

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    def slot(self, chunk: int) -> int:
        """Slot of a chunk in the device's allocation."""
        return self._slots[chunk]

    @property
    def front(self) -> int | None:
        """The chunk to wait for when no piece is ready; None when all have been taken."""
        return next(iter(self._urgent or self._rest), None)

    @property
    def finished(self) -> bool:
        return self.front is None and not self._moving

    def demand(self, chunks: Iterable[int]) -> None:
        """Moves waiting chunks to the front, in this order."""
        waiting = [chunk for chunk in dict.fromkeys(chunks) if chunk in self._urgent or chunk in self._rest]
        for chunk in reversed(waiting):
            self._rest.pop(chunk, None)
            self._urgent[chunk] = None
            self._urgent.move_to_end(chunk, last=False)

    def take(self, is_ready: Callable[[int], bool], at_most: int) -> CopyPiece | None:
        """Takes the next piece to move, of `at_most` chunks; None if none is ready."""
        for queue in (self._urgent, self._rest):
            for chunk in islice(queue, LOOKAHEAD_CHUNKS):
                if is_ready(chunk):
                    return self._take_from(queue, chunk, is_ready, at_most)
        return None

    def _take_from(
        self, queue: OrderedDict[int, None], chunk: int, is_ready: Callable[[int], bool], at_most: int
    ) -> CopyPiece:
        count = 1
        while count < at_most and chunk + count in queue and is_ready(chunk + count):
            count += 1
        piece = CopyPiece(chunk=chunk, count=count, slot=self._slots[chunk], urgent=queue is self._urgent)
        for taken in piece.chunks:
            del queue[taken]
        self._moving.update(piece.chunks)
        return piece

    def moved(self, piece: CopyPiece) -> None:
        """Marks a taken piece as moved."""
        self._moving.difference_update(piece.chunks)

    def has_moved(self, chunk: int) -> bool:
        """Checks whether a chunk has moved, or is not part of the transfer."""
        return chunk not in self._moving and chunk not in self._rest and chunk not in self._urgent


PIECE_BYTES = 8 * 1024 * 1024
"""Largest copy: PCIe runs at full speed, and larger buffers take longer to pin (0.7 ms a MiB beside an H200)."""
