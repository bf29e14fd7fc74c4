"""Parser of server-sent events, for `fs` and the Python client: they have no other code in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BILL_EVENT = "fleetstart"
"""The closing event of a stream, which carries the bill."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream."""

    name: str
    data: str
    id: str = ""


class EventParser:
    """Parser that is fed a stream in blocks of any size. An empty line ends an event; comments and unknown fields are
    skipped (WHATWG HTML).

    Lines end in LF or CRLF. What else `str.splitlines` takes for a line's end may stand inside JSON.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name = "message"
        self._data: list[str] = []
        self._id = ""

    def feed(self, block: bytes) -> list[ServerSentEvent]:
        """Takes one block; returns the events that it completes."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r").decode(errors="replace")))]

    def end(self) -> ServerSentEvent | None:
        """Returns the event that the end of the stream leaves open, if it has data."""
        rest, self._rest = self._rest, b""
        if rest:
            self._line(rest.decode(errors="replace"))
        return self._line("")

    def _line(self, line: str) -> ServerSentEvent | None:
        if not line:
            event = ServerSentEvent(self._name, "\n".join(self._data), self._id) if self._data else None
            self._name, self._data, self._id = "message", [], ""
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif field == "id":
            self._id = value
        return None


def parse_events(blocks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Parses the blocks of a stream into events."""
    parser = EventParser()
    for block in blocks:
        yield from parser.feed(block)
    if event := parser.end():
        yield event
