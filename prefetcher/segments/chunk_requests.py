"""Admission of what one worker asks for ahead of its turn: the chunks of its weights, each once. Pure.

The fill of a segment is shared by all workers of a checkpoint, and a worker's word is its user's code's. So it can
neither move the same chunks to the front again and again, nor keep the daemon busy with requests.
"""

from __future__ import annotations

from collections.abc import Collection

LOOKS_A_CHUNK = 4
"""Times that a chunk may be named on average: a worker waits for each once, in ranges that may overlap."""


class ChunkRequests:
    """The requests of one worker. `needed`: the chunks that it may need."""

    def __init__(self, needed: Collection[int]) -> None:
        self._waiting = set(needed)
        self._bounds = (min(self._waiting), max(self._waiting)) if self._waiting else (0, -1)
        self._looks = LOOKS_A_CHUNK * len(self._waiting)

    def admit(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts (first, last) of a requested range that may come first; most often the range itself, or nothing."""
        span = range(max(first, self._bounds[0]), min(last, self._bounds[1]) + 1)
        if not self._waiting or len(span) > self._looks:
            return []
        self._looks -= len(span)
        admitted: list[tuple[int, int]] = []
        for chunk in span:
            if chunk not in self._waiting:
                continue
            self._waiting.discard(chunk)
            if admitted and admitted[-1][1] == chunk - 1:
                admitted[-1] = (admitted[-1][0], chunk)
            else:
                admitted.append((chunk, chunk))
        return admitted
