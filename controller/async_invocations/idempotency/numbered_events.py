"""Numbers of the events of a keyed stream, from 1: the ids by which a client goes on after the last one it has.

The events are the same at each gateway, as the worker keeps them, so their numbers are. An id that the handler wrote is
replaced. Comments have no number.
"""

from __future__ import annotations

from ...http.asgi import Message, Send
from ..store.event_log import EventSplitter, without_id

EVENT_STREAM = b"text/event-stream"
HELD_MAX_BYTES = 1 << 20
"""Longest event that is numbered. A stream with a longer one goes on without numbers."""
NUMBERED = "fs.numbered"
"""Message key: the events of this piece with their numbers, 0 for what has none."""
LAST_ID_MAX_DIGITS = 12


def parse_last_id(text: str) -> int | None:
    """The number in `Last-Event-ID`; None if it is none."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= LAST_ID_MAX_DIGITS else None


def is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    found = dict(headers)
    return found.get(b"content-type", b"").startswith(EVENT_STREAM) and b"content-encoding" not in found


class NumberedEvents:
    """An ASGI `send` that gives each event of a stream its number; other answers pass unchanged."""

    def __init__(self, send: Send, *, count: int = 0) -> None:
        """`count`: number of the last event before the first one."""
        self._send = send
        self.count = count
        self._splitter: EventSplitter | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if is_event_stream(headers):
                self._splitter = EventSplitter()
                message = {**message, "headers": [pair for pair in headers if pair[0] != b"content-length"]}
            await self._send(message)
            return
        if self._splitter is None:
            await self._send(message)
            return
        last = not message.get("more_body", False)
        events = self._splitter.feed(message.get("body", b""))
        if last:
            events += self._splitter.end()
        numbered = [self._numbered(event) for event in events]
        if self._splitter.held_bytes > HELD_MAX_BYTES:
            numbered.append((0, self._splitter.give_up()))
            self._splitter = None
        if numbered or last:
            await self._send({**message, "body": b"".join(data for _, data in numbered), NUMBERED: numbered})

    def _numbered(self, event: bytes) -> tuple[int, bytes]:
        if all(line.startswith(b":") for line in event.splitlines()):
            return 0, event + b"\n\n"
        self.count += 1
        return self.count, b"id: %d\n%s\n\n" % (self.count, without_id(event))


class AfterEvent:
    """An ASGI `send` that leaves out the events that the client has: those up to the number `last`."""

    def __init__(self, send: Send, last: int) -> None:
        self._send = send
        self._last = last
        self._passed = last

    async def __call__(self, message: Message) -> None:
        if self._last and NUMBERED in message:
            body = b"".join(self._left(number, data) for number, data in message[NUMBERED])
            message = {**message, "body": body}
        await self._send(message)

    def _left(self, number: int, data: bytes) -> bytes:
        if number:
            self._passed = number
        return data if self._passed > self._last else b""


def events_after(body: bytes, last: int) -> bytes:
    """The numbered events of a stored stream after the number `last`."""
    splitter = EventSplitter()
    events = [*splitter.feed(body), *splitter.end()]
    count = 0
    kept = []
    for event in events:
        count += not all(line.startswith(b":") for line in event.splitlines())
        if count > last:
            kept.append(event + b"\n\n")
    return b"".join(kept)
