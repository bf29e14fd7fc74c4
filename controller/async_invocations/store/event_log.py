"""Event log of a streaming response, numbered, so that a client that reconnects misses no event.

The log is a Redis stream whose entry ids are the event ids: the claim under which the response is made, and the number
of the event in it. A gateway that lost its claim cannot write any more, as ids only grow. Every gateway can serve the
log. It holds the last `EVENTS_MAX` events; the whole response is stored as the result.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, NamedTuple, cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import ErrorBody, FleetError, InvalidInput, Refused, error_from
from fleetstart.runtime.contract.ids import InvocationId

from ...state.redis_server.stream_followers import Entry, StreamFollowers, read_after

EVENTS_MAX = 1024
_NOT_ABOVE_LAST = "equal or smaller than the target stream top item"
"""How Redis' error ends for an id that is not above the last one. Others, such as those of a full or a read-only Redis,
have no code that sets this one apart."""
_ID = re.compile(r"(\d{1,9})-(\d{1,12})")
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class EventsGone(Refused):
    """The events after `Last-Event-ID` have left the log."""

    code = "events_gone"
    status = 410


class EventId(NamedTuple):
    claim: int
    number: int

    def __str__(self) -> str:
        return f"{self.claim}-{self.number}"


START = EventId(0, 0)


class StreamEvent(NamedTuple):
    id: EventId
    data: bytes
    """The event as the worker wrote it, without its id and the empty line at the end."""

    def encoded(self) -> bytes:
        return b"id: %s\n%s\n\n" % (str(self.id).encode(), self.data)


def parse_event_id(text: str) -> EventId:
    """Parses a `Last-Event-ID`. Errors: InvalidInput."""
    match = _ID.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"Last-Event-ID {text[:40]!r} is invalid", hint="leave it out to read from the start")
    return EventId(int(match[1]), int(match[2]))


class EventSplitter:
    """Splits a byte stream into whole server-sent events, unchanged; empty ones are left out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        # A terminator may begin in the last three bytes of what was searched before.
        begin = max(0, len(self._rest) - 3)
        self._rest += piece
        events, ended = [], 0
        while match := _END.search(self._rest, begin):
            events.append(bytes(self._rest[ended : match.start()]))
            begin = ended = match.end()
        del self._rest[:ended]
        return [event for event in events if event.strip(b"\r\n")]

    @property
    def held_bytes(self) -> int:
        """Size of an event that has not ended."""
        return len(self._rest)

    def give_up(self) -> bytes:
        """Returns what it holds of an event that has not ended, as it came."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest

    def end(self) -> list[bytes]:
        """Returns the last event if the stream ended without its terminator."""
        rest, self._rest = bytes(self._rest).strip(b"\r\n"), bytearray()
        return [rest] if rest else []


def without_id(event: bytes) -> bytes:
    """Removes an event's id, which the log's id replaces. Empty if nothing else is left."""
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line for line in lines if line and not line.startswith((b"id:", b"id\n")) and line != b"id")


def check_reachable(last: EventId, first: EventId | None) -> None:
    """Checks that the event after `last` is in the log, whose oldest is `first`. Errors: EventsGone."""
    if first is None:
        return
    wanted = EventId(last.claim, last.number + 1) if last.claim == first.claim else EventId(first.claim, 1)
    if first > wanted:
        raise EventsGone(
            f"events before {first} were dropped, and Last-Event-ID is {last}",
            hint=f"the last {EVENTS_MAX} are kept: read the whole response at its `result_url` when it has ended",
        )


def error_of(event: bytes) -> FleetError | None:
    """Parses the platform's error event that ends a failed stream; None for any other event."""
    if not event.startswith(b"event: error\n"):
        return None
    data = event.partition(b"data: ")[2]
    try:
        return error_from(msgspec.json.decode(data, type=ErrorBody).error)
    except UNDECODABLE:
        return None


class EventLog:
    """Event log of one invocation in Redis. Errors: REDIS_ERRORS."""

    def __init__(self, client: redis.Redis, invocation: InvocationId) -> None:
        self._client = client
        self._key = keys.invocation_events(invocation)

    async def append(self, claim: int, begin: int, events: list[bytes], *, after_gap: bool = False) -> None:
        """Appends events, numbered from `begin`, all or none. Idempotent.

        `after_gap`: the event before them was dropped. Those in the log leave it, so that its readers see that.
        """
        async with self._client.pipeline(transaction=True) as pipe:
            for number, event in enumerate(events, begin):
                kept = 1 if after_gap and number == begin else EVENTS_MAX
                pipe.xadd(self._key, {"e": event}, id=f"{claim}-{number}", maxlen=kept, approximate=False)
            answers = await pipe.execute(raise_on_error=False)
        for answer in answers:
            # It is there already (a try before this one was cut off), or a later claim writes by now.
            if isinstance(answer, Exception) and not str(answer).endswith(_NOT_ABOVE_LAST):
                raise answer

    async def first(self) -> EventId | None:
        entries = await cast(Awaitable[Any], self._client.xrange(self._key, count=1))
        return _id(entries[0][0]) if entries else None

    async def last(self) -> EventId | None:
        entries = await cast(Awaitable[Any], self._client.xrevrange(self._key, count=1))
        return _id(entries[0][0]) if entries else None

    async def after(self, last: EventId) -> list[StreamEvent]:
        """Reads a page of the events after `last`."""
        return [_event(entry) for entry in await read_after(self._client, self._key, str(last))]

    async def follow(
        self, followers: StreamFollowers, last: EventId, *, quiet_s: float
    ) -> AsyncGenerator[list[StreamEvent], None]:
        """Yields pages of events; an empty one after each `quiet_s` without any."""
        async with contextlib.aclosing(followers.follow(self._key, str(last), quiet_s=quiet_s)) as pages:
            async for page in pages:
                yield [_event(entry) for entry in page]


def _event(entry: Entry) -> StreamEvent:
    name, fields = entry
    return StreamEvent(_id(name), fields[b"e"])


def _id(name: bytes) -> EventId:
    claim, _, number = name.decode().partition("-")
    return EventId(int(claim), int(number))
