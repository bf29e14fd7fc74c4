"""Which chunks move to a device next, and where they lie there: decisions, with no device and no thread in sight.

The device gets one allocation with a slot for each chunk that is wanted, in the segment's order, so a tensor's chunks
are neighbours there as they are in the segment. Chunks move in pieces: as many neighbours as are ready and fit one
staging buffer, so a stream that trickles moves chunk by chunk and a full segment moves in large copies
(ServerlessLLM section 4.2 has chunks of one size). What was asked for first, or is waited for now, goes before the
rest; what is not there yet holds up nothing that is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

LOOKAHEAD_CHUNKS = 256
"""How far behind the next chunk a ready one is looked for: a source has fewer ranges than that in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPiece:
    """One copy: `count` chunks from `chunk` on, to as many slots from `slot` on."""

    chunk: int
    count: int
    slot: int
    urgent: bool

    @property
    def chunks(self) -> range:
        return range(self.chunk, self.chunk + self.count)


class TransferPlan:
    """Chunks on their way to a device: waiting, moving, moved. Not thread-safe: its owner has a lock."""

    def __init__(self, chunks: Iterable[int], *, first: Iterable[int] = ()) -> None:
        """`chunks` are all that move, `first` those of them that are urgent, in their order."""
        wanted = sorted(set(chunks))
        self._slots = {chunk: slot for slot, chunk in enumerate(wanted)}
        # Ordered by linked list: a plain dict looks for its first key among all that were ever taken.
        self._rest = OrderedDict.fromkeys(wanted)
        self._urgent: OrderedDict[int, None] = OrderedDict()
        self._moving: set[int] = set()
        self.demand(first)

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    def slot(self, chunk: int) -> int:
        return self._slots[chunk]

    @property
    def front(self) -> int | None:
        """The chunk to wait for when nothing can be taken; None when everything was."""
        return next(iter(self._urgent or self._rest), None)

    @property
    def finished(self) -> bool:
        return self.front is None and not self._moving

    def demand(self, chunks: Iterable[int]) -> None:
        """Those that still wait go before everything else, in this order."""
        waiting = [chunk for chunk in dict.fromkeys(chunks) if chunk in self._urgent or chunk in self._rest]
        for chunk in reversed(waiting):
            self._rest.pop(chunk, None)
            self._urgent[chunk] = None
            self._urgent.move_to_end(chunk, last=False)

    def take(self, is_ready: Callable[[int], bool], at_most: int) -> CopyPiece | None:
        """The next piece to move, of so many chunks at most; its taker's from now on. None if none is ready yet."""
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
        self._moving.difference_update(piece.chunks)

    def has_moved(self, chunk: int) -> bool:
        return chunk not in self._moving and chunk not in self._rest and chunk not in self._urgent


PIECE_BYTES = 16 * 1024 * 1024
"""Of one copy, at most: past some 8 MiB PCIe is as fast as it gets, and larger buffers take longer to pin."""
