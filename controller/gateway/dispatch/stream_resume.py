"""Keeps what a streamed answer needs to go on at another worker, and takes it out of what the client gets.

A worker that can be continued puts marks between its events (`headers.MARK`). What they say is for workers alone.
Events are passed on once their mark is there, so the client always has what the marks say and no more: whoever
continues after the last of them leaves out nothing and repeats nothing. Pure.
"""

from __future__ import annotations

from fleetstart.runtime.contract.worker_headers import MARK

KEPT_BYTES = 2 << 20
"""Marks of one stream: those of a hundred thousand tokens. One with more is passed on, and cannot be continued."""
HELD_BYTES = 256 << 10
"""Events whose mark has not come. A worker writes them together, so that a stream that has more is not marked."""


class ResumeMarkers:
    def __init__(self) -> None:
        self._held = bytearray()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.whole = True
        """Whether they tell of all that was passed on."""

    def feed(self, piece: bytes) -> bytes:
        """What the client may have now."""
        held = self._held
        held += piece
        ready = bytearray()
        while (found := self._find()) is not None:
            begin, end = found
            ready += held[:begin]
            self._keep(bytes(held[begin + len(MARK) : end]))
            del held[: end + 2]
        if len(held) > HELD_BYTES:
            ready += self.flush()
        return bytes(ready)

    def flush(self) -> bytes:
        """What came after the last mark: to be passed on if the stream has ended as it should."""
        rest = bytes(self._held)
        self._held.clear()
        if rest:
            self._give_up()
        return rest

    def encode(self) -> bytes:
        """All marks, for the next worker. What came after the last of them is forgotten: that worker says it anew."""
        self._held.clear()
        return b"\n".join(self._kept)

    def _find(self) -> tuple[int, int] | None:
        """Where the next mark begins and where it ends."""
        if self._held.startswith(MARK):
            begin = 0
        else:
            begin = self._held.find(b"\n\n" + MARK) + 2
            if begin < 2:
                return None
        end = self._held.find(b"\n\n", begin)
        return (begin, end) if end >= 0 else None

    def _keep(self, mark: bytes) -> None:
        self._kept_bytes += len(mark) + 1
        if self._kept_bytes > KEPT_BYTES:
            self._give_up()
        if self.whole:
            self._kept.append(mark)

    def _give_up(self) -> None:
        self.whole = False
        self._kept.clear()
