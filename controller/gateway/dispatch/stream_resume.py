"""Resume markers of an event stream: kept for the next worker, removed from what the client gets.

A worker whose streams can be continued puts markers between its events (`worker_headers.MARK`), for other workers
alone. Events are forwarded once their marker is there, so the client always has what the markers cover and no more: a
worker that continues after the last of them omits nothing and repeats nothing. Pure.
"""

from __future__ import annotations

from fleetstart.runtime.contract.worker_headers import MARK

KEPT_BYTES = 2 << 20
"""Most bytes of markers kept of one stream, about a hundred thousand tokens. Beyond, it cannot be continued."""
HELD_BYTES = 256 << 10
"""Most bytes of events held until their marker comes. A worker writes both together: a stream beyond has no markers."""


class ResumeMarkers:
    def __init__(self) -> None:
        self._held = bytearray()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.whole = True
        """The markers cover all that was forwarded."""

    def feed(self, piece: bytes) -> bytes:
        """Takes a piece from the worker. Returns what may be forwarded now."""
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
        """Returns what came after the last marker, to be forwarded when the stream has ended normally."""
        rest = bytes(self._held)
        self._held.clear()
        if rest:
            self.give_up()
        return rest

    def encode(self) -> bytes:
        """Encodes the markers for the next worker. Drops what came after the last one: that worker sends it again."""
        self._held.clear()
        return b"\n".join(self._kept)

    def _find(self) -> tuple[int, int] | None:
        """Offsets of the next marker's begin and end; None if it is not complete."""
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
            self.give_up()
        if self.whole:
            self._kept.append(mark)

    def give_up(self) -> None:
        """Stops keeping markers: they do not cover all that the client has."""
        self.whole = False
        self._kept.clear()
