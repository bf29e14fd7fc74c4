"""Store of async invocations in Redis: reads, compare-and-set changes, the queues of due ones, and change events.

Every change names the state that it was made from, so a gateway that lost its claim cannot write: the claim's number
is part of the state. `lifecycle` decides transitions. Without Redis methods raise REDIS_ERRORS; the caller waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import NotFound, QueueFull, Unavailable
from fleetstart.runtime.contract.function.names import DEFAULT_PROJECT
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from fleetstart.runtime.contract.process.subscription import messages
from fleetstart.runtime.contract.process.tasks import wait_at_most
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from ...state.invocation_records import Envelope, Progress
from ...state.redis_client import REDIS_ERRORS, Script
from ...state.unreadable import unreadable
from . import lifecycle

log = logging.getLogger(__name__)

DUE_MAX = 10_000
"""Invocations of one function that wait or run; more are rejected."""
SEARCHED = 250_000
"""Invocations that a search looks at, at most: a few seconds of Redis, in pieces."""
SEARCHED_AT_ONCE = 250
"""Invocations that are looked at in one round trip: a few milliseconds, in which Redis serves nobody else."""
TRIES = 20
"""Attempts of a compare-and-set. So many concurrent changes of one invocation are a bug."""
RECHECK_S = 1.0
"""Polling interval of a waiter: a published event may be lost."""
_NO_ID = InvocationId("")


@dataclass(frozen=True, slots=True)
class StoredInvocation:
    """An invocation as it was read: what was accepted, and its progress."""

    envelope: Envelope
    progress: Progress
    raw: bytes
    """The progress as stored, for the compare-and-set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueInvocations:
    """Invocations that are due now, the longest overdue first."""

    runs: dict[FunctionName, list[InvocationId]]
    timers: list[InvocationId]
    """Invocations with a webhook to deliver, or past their queue timeout."""
    next_unix_ms: int | None
    """Time at which the next one is due."""
    counts: dict[FunctionName, int]
    """Invocations of each function that wait or run, due or not."""


class InvocationStore:
    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._script = Script(client, "invocation")
        self._search = Script(client, "find_invocations")
        self._envelopes = RecordDecoder(Envelope)
        self._progress = RecordDecoder(Progress)
        self._listeners: list[Callable[[str, InvocationId], None]] = []
        self._waiters: dict[InvocationId, set[asyncio.Event]] = {}
        self._functions: list[FunctionName] = []
        """Functions that had calls when it was looked for due ones last."""

    def on_event(self, listener: Callable[[str, InvocationId], None]) -> None:
        """Registers a listener for changes by any controller: it gets the status, or "cancelling", and the id."""
        self._listeners.append(listener)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────

    async def get(self, invocation: InvocationId) -> StoredInvocation | None:
        """Reads an invocation; None if there is none. Errors: Unavailable for one that this release cannot read."""
        raw = await cast(Awaitable[Any], self._client.hmget(keys.invocation(invocation), ["call", "state"]))
        return self._entry(raw)

    async def require(self, invocation: InvocationId) -> StoredInvocation:
        """Reads an invocation. Errors: NotFound, Unavailable."""
        entry = await self.get(invocation)
        if entry is None:
            raise not_kept(invocation)
        return entry

    async def find(
        self, limit: int, *, functions: Sequence[str] = (), project: str = "", status: str = "", dead: bool = False
    ) -> AsyncIterator[StoredInvocation]:
        """Yields invocations, the last accepted first: of the `functions`, if there are some, of a project, in a state,
        or dead letters. Searches the newest `SEARCHED`; `limit` is how many are wanted at a time."""
        begin, seen = 0, set[bytes]()
        while begin < SEARCHED:
            arguments: list[str | bytes | int] = [begin, begin + SEARCHED_AT_ONCE - 1, keys.invocation(_NO_ID), limit]
            looked, *found = await self._search(
                [keys.INVOCATIONS_INDEX], [*arguments, status, int(dead), project, DEFAULT_PROJECT, *functions]
            )
            if not looked:
                return
            begin += looked
            for name, *raw in zip(found[::3], found[1::3], found[2::3], strict=True):
                if name in seen:  # newer ones have come meanwhile, and moved it
                    continue
                seen.add(name)
                try:
                    entry = self._entry(raw)
                except Unavailable:
                    continue  # of another release, which lists it
                if entry is not None:
                    yield entry

    async def due(self, now_unix_ms: int, limit: int) -> DueInvocations:
        """Reads what is due. The functions that had calls at the last look are asked for together with those that have
        some now, so that only a new one takes a second round trip."""
        guessed = self._functions
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.smembers(keys.INVOCATIONS_FUNCTIONS)
            for name in (None, *guessed):
                _ask_due(pipe, name, now_unix_ms, limit)
            members, timers, first_timer, _, *answers = await pipe.execute()
        found = dict(zip(guessed, zip(*[iter(answers)] * 3, strict=True), strict=True))
        self._functions = functions = [FunctionName(name.decode()) for name in members]
        new = [name for name in functions if name not in found]
        if new:
            async with self._client.pipeline(transaction=False) as pipe:
                for name in new:
                    _ask_due(pipe, name, now_unix_ms, limit)
                answers = await pipe.execute()
            found |= zip(new, zip(*[iter(answers)] * 3, strict=True), strict=True)
        firsts = [first_timer, *(found[name][1] for name in functions)]
        return DueInvocations(
            runs={name: [InvocationId(raw.decode()) for raw in found[name][0]] for name in functions if found[name][0]},
            timers=[InvocationId(raw.decode()) for raw in timers],
            next_unix_ms=min((int(first[0][1]) for first in firsts if first), default=None),
            counts={name: int(found[name][2]) for name in functions},
        )

    async def overdue(self, now_unix_ms: int, limit: int) -> list[InvocationId]:
        """Lists invocations whose retention is over."""
        found = await self._client.zrangebyscore(keys.INVOCATIONS_KEPT, "-inf", now_unix_ms, 0, limit)
        return [InvocationId(raw.decode()) for raw in cast(list[bytes], found)]

    def _entry(self, raw: list[bytes | None]) -> StoredInvocation | None:
        call, state = raw
        if call is None or state is None:
            return None
        try:
            return StoredInvocation(self._envelopes.decode(call), self._progress.decode(state), state)
        except UnreadableRecord as error:
            raise unreadable("an async invocation", error) from error

    # ── changing ───────────────────────────────────────────────────────────────────────────────────

    async def create(self, envelope: Envelope, progress: Progress) -> bool:
        """Stores a new invocation; False if the id is taken. Errors: QueueFull."""
        done = await self._run(envelope, b"", progress, call=msgspec.json.encode(envelope), publish=progress.status)
        if done < 0:
            raise QueueFull(
                f"function {envelope.function}: {DUE_MAX} of its async invocations wait already",
                hint="try again later, or raise `scale.max`",
                retry_after_s=30,
            )
        return bool(done)

    async def write(self, entry: StoredInvocation, progress: Progress, *, publish: str = "") -> StoredInvocation | None:
        """Writes a new state, and returns the changed entry; None if it was changed concurrently."""
        if not await self._run(entry.envelope, entry.raw, progress, publish=publish):
            return None
        return StoredInvocation(entry.envelope, progress, msgspec.json.encode(progress))

    async def change(
        self, invocation: InvocationId, change: Callable[[StoredInvocation], Progress], *, publish: str = ""
    ) -> StoredInvocation:
        """Applies `change`; returns the entry, the same one if nothing changed. Errors: NotFound; those of `change`."""
        for _ in range(TRIES):
            entry = await self.require(invocation)
            progress = change(entry)
            if progress == entry.progress:
                return entry
            written = await self.write(entry, progress, publish=publish or progress.status)
            if written is not None:
                return written
        raise Unavailable(f"invocation {invocation}: too many concurrent changes", retry_after_s=1)

    async def delete(self, entry: StoredInvocation) -> bool:
        return bool(await self._run(entry.envelope, entry.raw, None))

    async def forget(self, function: FunctionName | None, invocation: InvocationId) -> None:
        """Removes an invocation without a record from the indices."""
        async with self._client.pipeline(transaction=False) as pipe:
            if function is not None:
                pipe.zrem(keys.invocations_due(function), invocation)
            pipe.zrem(keys.INVOCATIONS_TIMERS, invocation)
            pipe.zrem(keys.INVOCATIONS_KEPT, invocation)
            pipe.zrem(keys.INVOCATIONS_INDEX, invocation)
            await pipe.execute()

    async def look_later(self, invocation: InvocationId, unix_ms: int) -> None:
        """Puts off the time at which its timer is looked at, never to before the one that its state has."""
        await self._client.zadd(keys.INVOCATIONS_TIMERS, {invocation: unix_ms}, xx=True, gt=True)

    async def _run(
        self, envelope: Envelope, before: bytes, after: Progress | None, *, call: bytes = b"", publish: str = ""
    ) -> int:
        due = lifecycle.due_unix_ms(after) if after is not None else None
        timer = lifecycle.timer_unix_ms(after) if after is not None else None
        return int(
            await self._script(
                [
                    keys.invocation(envelope.id),
                    keys.invocations_due(envelope.function),
                    keys.INVOCATIONS_FUNCTIONS,
                    keys.INVOCATIONS_KEPT,
                    keys.INVOCATIONS_INDEX,
                    keys.invocation_events(envelope.id),
                    keys.INVOCATIONS_TIMERS,
                ],
                [
                    envelope.id,
                    envelope.function,
                    before,
                    msgspec.json.encode(after) if after is not None else b"",
                    call,
                    due if due is not None else "",
                    timer if timer is not None else "",
                    lifecycle.kept_until_unix_ms(after, envelope) if after is not None else 0,
                    envelope.accepted_unix_ms,
                    keys.EVENTS_INVOCATIONS,
                    publish,
                    DUE_MAX,
                ],
            )
        )

    # ── waiting ────────────────────────────────────────────────────────────────────────────────────

    async def wait_ended(
        self, invocation: InvocationId, wait_s: float, stopping: asyncio.Event
    ) -> StoredInvocation | None:
        """Waits until the invocation has ended, `wait_s` are over, or this controller stops; returns its last state."""
        ends = time.monotonic() + wait_s
        event = asyncio.Event()
        self._waiters.setdefault(invocation, set()).add(event)
        try:
            while True:
                event.clear()
                entry = await self.get(invocation)
                left_s = ends - time.monotonic()
                if entry is None or entry.progress.ended or left_s <= 0 or stopping.is_set():
                    return entry
                await wait_at_most(event, min(left_s, RECHECK_S))
        finally:
            waiters = self._waiters.get(invocation, set())
            waiters.discard(event)
            if not waiters:
                self._waiters.pop(invocation, None)

    async def run(self) -> None:
        """Subscribes to change events and passes them on to listeners and waiters."""
        while True:
            pubsub = self._client.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(keys.EVENTS_INVOCATIONS)
                async for message in messages(pubsub):
                    self._heard(message["data"].decode())
            except REDIS_ERRORS:
                await asyncio.sleep(0.1)
            finally:
                with contextlib.suppress(*REDIS_ERRORS):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _heard(self, text: str) -> None:
        status, _, name = text.partition(" ")
        invocation = InvocationId(name)
        for listener in self._listeners:
            listener(status, invocation)
        for event in self._waiters.get(invocation, ()):
            event.set()


def not_kept(invocation: InvocationId) -> NotFound:
    return NotFound(
        f"invocation {invocation[:130]} is not stored",
        hint="async invocations are stored until their time to live is over: `fs invocations ls`",
    )


def _ask_due(pipe: Any, function: FunctionName | None, now_unix_ms: int, limit: int) -> None:
    """Asks for a function's calls that are due, or for timers, for when the next one is, and for their number."""
    key = keys.invocations_due(function) if function is not None else keys.INVOCATIONS_TIMERS
    pipe.zrangebyscore(key, "-inf", now_unix_ms, 0, limit)
    pipe.zrangebyscore(key, f"({now_unix_ms}", "+inf", 0, 1, withscores=True)
    pipe.zcard(key)
