"""Values of a Redis in memory that Python has no type for: streams, sorted sets, and sets in a lasting order."""

from __future__ import annotations


class Stream:
    """Entries in the order of their ids."""

    def __init__(self) -> None:
        self.ids: list[tuple[int, int]] = []
        self.entries: list[list[bytes]] = []
        self.last = (0, 0)

    def append(self, now_ms: int, fields: list[bytes]) -> bytes:
        self.last = (now_ms, 0) if now_ms > self.last[0] else (self.last[0], self.last[1] + 1)
        self.ids.append(self.last)
        self.entries.append(fields)
        return stream_id(self.last)

    def cut(self, begin: int) -> int:
        del self.ids[:begin]
        del self.entries[:begin]
        return begin


def stream_id(one: tuple[int, int]) -> bytes:
    return b"%d-%d" % one


class SortedSet(dict[bytes, float]):
    """Scores by member."""

    def ordered(self) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in self.items())


class OrderedMembers(dict[bytes, None]):
    """A set that keeps its order, so that a run can be repeated."""
