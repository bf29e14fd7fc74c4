"""The pulls of a multicast plan in one fetch: which chunks come from which source, and which of them may be asked for.

Pulls go in order: the next ones begin when those before have come. Chunks whose source is lost are released: they come
from any that has them, like chunks that no pull names. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WINDOW = 2
"""Pulls under way at once: while one arrives, the next is asked for, so that no round trip lies between them."""


@dataclass(slots=True)
class PlannedPull:
    """The next step of the plan: chunks, and the index of their source."""

    source_index: int
    chunks: list[int]
    is_open: bool = False


class PullPlan:
    """The pulls that are left, and whose chunk each is."""

    def __init__(self, pulls: Iterable[tuple[int, Iterable[int]]] = ()) -> None:
        """Of a chunk that several pulls name, the first counts."""
        self._pulls: deque[PlannedPull] = deque()
        self._owners: dict[int, int] = {}
        for source_index, chunks in pulls:
            own = [chunk for chunk in chunks if chunk not in self._owners]
            self._owners.update(dict.fromkeys(own, source_index))
            self._pulls.append(PlannedPull(source_index, own))

    def owner(self, chunk: int) -> int | None:
        """The source that the chunk is planned from; None if any may deliver it."""
        return self._owners.get(chunk)

    def release(self, chunk: int) -> bool:
        """Lets any source deliver the chunk; True if one alone could."""
        return self._owners.pop(chunk, None) is not None

    def release_source(self, source_index: int) -> list[int]:
        """Releases all chunks of a source; returns them."""
        released = [chunk for chunk, owner in self._owners.items() if owner == source_index]
        for chunk in released:
            del self._owners[chunk]
        return released

    def advance(self, is_awaited: Callable[[int], bool]) -> list[PlannedPull]:
        """The pulls that may begin now, each once. `is_awaited`: whether a chunk is wanted and has not come."""
        while self._pulls and not self._left(self._pulls[0], is_awaited):
            for chunk in self._pulls.popleft().chunks:
                self._owners.pop(chunk, None)
        opened = [pull for pull in list(self._pulls)[:WINDOW] if not pull.is_open]
        for pull in opened:
            pull.is_open = True
        return opened

    def _left(self, pull: PlannedPull, is_awaited: Callable[[int], bool]) -> bool:
        return any(chunk in self._owners and is_awaited(chunk) for chunk in pull.chunks)
