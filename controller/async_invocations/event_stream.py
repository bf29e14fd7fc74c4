"""Server-sent events of an invocation: those in the log, new ones as they come, and a last one with its end state.

The last event is the platform's: `event: invocation`. A client that reconnects with its id has read everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import InvocationId

from ..http.asgi import error_event
from ..state.redis_client import REDIS_ERRORS
from ..state.redis_server.stream_followers import StreamFollowers
from .presenter import InvocationPresenter
from .store.event_log import START, EventId, EventLog, EventsGone, check_reachable, parse_event_id
from .store.invocations import InvocationStore, StoredInvocation

QUIET_S = 0.5
"""Time without events after which the invocation's state is looked at: its end is seen that late."""
KEEP_ALIVE_EVERY = 30
"""Empty reads between two keep-alive comments, for proxies: about 15 s."""


class EventStream:
    def __init__(
        self,
        client: redis.Redis,
        followers: StreamFollowers,
        invocations: InvocationStore,
        presenter: InvocationPresenter,
        stopping: asyncio.Event,
    ) -> None:
        self._client = client
        self._followers = followers
        self._invocations = invocations
        self._presenter = presenter
        self._stopping = stopping

    async def begin(self, entry: StoredInvocation, last: str) -> EventId | None:
        """Returns the event after which to go on; None if all were read. Errors: InvalidInput, EventsGone."""
        events = EventLog(self._client, entry.envelope.id)
        begin = parse_event_id(last) if last else START
        check_reachable(begin, await events.first())
        if last and entry.progress.ended and begin >= await self._end_of(entry, events):
            return None
        return begin

    def place(self, caller: str) -> AbstractContextManager[None]:
        """A place among the followers. Errors: TooManyFollowers."""
        return self._followers.place(caller)

    async def follow(self, invocation: InvocationId, last: EventId) -> AsyncIterator[bytes]:
        events, quiet = EventLog(self._client, invocation), 0
        try:
            async with contextlib.aclosing(events.follow(self._followers, last, quiet_s=QUIET_S)) as pages:
                while not self._stopping.is_set():
                    entry = await self._invocations.get(invocation)
                    # before the look: what it says has ended has all its events
                    ended = entry is None or entry.progress.ended
                    page = await (events.after(last) if ended else anext(pages))
                    if page:
                        check_reachable(last, page[0].id)
                        last, quiet = page[-1].id, 0
                        yield b"".join(event.encoded() for event in page)
                    elif ended:
                        if entry is not None:
                            yield await self._end(entry, events)
                        return
                    else:
                        quiet += 1
                        if quiet % KEEP_ALIVE_EVERY == 0:
                            yield b": waiting\n\n"
        except EventsGone as gone:
            yield error_event(gone, invocation)
        except REDIS_ERRORS:
            yield error_event(
                Unavailable("Redis does not answer", hint="come back with Last-Event-ID", retry_after_s=1), invocation
            )

    async def _end(self, entry: StoredInvocation, events: EventLog) -> bytes:
        data = msgspec.json.encode(self._presenter.briefly(entry))
        return b"id: %s\nevent: invocation\ndata: %s\n\n" % (str(await self._end_of(entry, events)).encode(), data)

    async def _end_of(self, entry: StoredInvocation, events: EventLog) -> EventId:
        """The id of the last event: the one after all of the last claim."""
        last = await events.last()
        if last is None or last.claim < entry.progress.claims:
            return EventId(entry.progress.claims, 1)
        return EventId(last.claim, last.number + 1)
