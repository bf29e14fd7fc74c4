"""The followers of streams in Redis (logs, events of answers): one blocking reader for all of them, and their limits.

A follower has its own position. While it keeps up, it gets the pages of the shared reader; one that has just come, or
that is slow, reads what it lacks by itself, without blocking. So any number of followers holds one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import redis.asyncio as redis

from fleetstart.runtime.contract.errors import QueueFull
from fleetstart.runtime.contract.process.tasks import end_tasks

from ..redis_client import REDIS_ERRORS

Entry = tuple[bytes, dict[bytes, bytes]]
"""Id and fields."""

FOLLOWERS_MAX = 500
"""Followers of a controller: each is an open response, and some kilobytes."""
FOLLOWERS_EACH = 100
"""Those of one API key, so that one key does not take all places."""
PAGE = 100
HELD = 4 * PAGE
"""Entries held for a follower that is slower than the stream; beyond, it reads them by itself when it gets to them."""
READS_AT_ONCE = 4
"""Followers that read by themselves at the same time; others wait for their turn, also when all come at once. They
would wait for a connection otherwise, of which other work needs some, and end with an error after two seconds."""
BLOCK_MS = 200
"""Blocking time of the shared read: what comes in the first moments of a stream's first follower may be that late."""


class TooManyFollowers(QueueFull):
    """The limit of followers is reached."""

    code = "too_many_followers"


class _Follower:
    def __init__(self, last: str) -> None:
        self.last = last
        self.held: deque[Entry] = deque()
        self.behind = True
        """True if there may be entries after `last` that are not in `held`."""
        self.failure: BaseException | None = None
        self.woken = asyncio.Event()

    def give(self, entries: list[Entry]) -> None:
        if len(self.held) + len(entries) > HELD:
            self.held.clear()
            self.behind = True
        elif not self.behind:
            self.held.extend(entries)
        self.woken.set()


class StreamFollowers:
    """`client` serves the shared reader alone; `reads` what followers read by themselves."""

    def __init__(
        self,
        client: redis.Redis,
        reads: redis.Redis,
        *,
        most: int = FOLLOWERS_MAX,
        most_each: int = FOLLOWERS_EACH,
    ) -> None:
        self._client = client
        self._reads = reads
        self._most = most
        self._most_each = most_each
        self._by_key: dict[str, set[_Follower]] = {}
        self._positions: dict[str, str] = {}
        self._callers: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(READS_AT_ONCE)
        self._reader: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends the shared reader, so that its client can be closed: it would connect again."""
        if self._reader is not None:
            await end_tasks([self._reader])

    @property
    def count(self) -> int:
        return self._callers.total()

    def place(self, caller: str) -> AbstractContextManager[None]:
        """A place among the followers. Errors: TooManyFollowers, at once and when it is entered."""
        self._check(caller)
        return self._held_place(caller)

    @contextlib.contextmanager
    def _held_place(self, caller: str) -> Iterator[None]:
        self._check(caller)
        self._callers[caller] += 1
        try:
            yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]

    def _check(self, caller: str) -> None:
        if self._callers[caller] >= self._most_each:
            said = f"{self._callers[caller]} log or event streams are open with this key, and {self._most_each} may be"
        elif self.count >= self._most:
            said = f"{self.count} log or event streams are open at this controller, and {self._most} may be"
        else:
            return
        raise TooManyFollowers(said, hint="close some of them, or read without `follow`", retry_after_s=5)

    async def follow(self, key: str, last: str, *, quiet_s: float) -> AsyncGenerator[list[Entry], None]:
        """Yields pages of the entries after the id `last`; an empty one after each `quiet_s` without any.

        Errors: REDIS_ERRORS.
        """
        follower = _Follower(last)
        self._join(key, follower)
        try:
            while True:
                yield await self._next(key, follower, quiet_s)
        finally:
            self._leave(key, follower)

    async def _next(self, key: str, follower: _Follower, quiet_s: float) -> list[Entry]:
        if follower.behind:
            # First the mark, then the look: what the shared reader gives meanwhile is held, and comes twice at most.
            follower.behind = False
            async with self._turns:
                if follower.failure is not None:  # of Redis, found by the shared reader meanwhile
                    raise follower.failure
                page = await read_after(self._reads, key, follower.last)
            follower.behind = follower.behind or len(page) == PAGE
        else:
            page = []
        if not page:
            page = await self._held(follower, quiet_s)
        if page:
            follower.last = page[-1][0].decode()
        return page

    async def _held(self, follower: _Follower, quiet_s: float) -> list[Entry]:
        if not follower.held and not follower.behind:
            follower.woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(quiet_s):
                    await follower.woken.wait()
        if follower.failure is not None:
            raise follower.failure
        page: list[Entry] = []
        while follower.held and len(page) < PAGE:
            entry = follower.held.popleft()
            if order(entry[0]) > order(follower.last):
                page.append(entry)
        return page

    # ── the shared reader ──────────────────────────────────────────────────────────────────────────

    def _join(self, key: str, follower: _Follower) -> None:
        self._by_key.setdefault(key, set()).add(follower)
        self._positions.setdefault(key, follower.last)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(), name="stream-followers")

    def _leave(self, key: str, follower: _Follower) -> None:
        followers = self._by_key[key]
        followers.discard(follower)
        if not followers:
            del self._by_key[key], self._positions[key]

    async def _read(self) -> None:
        while self._by_key:
            try:
                pages = await _read_streams(self._client, dict(self._positions), BLOCK_MS)
            except REDIS_ERRORS as error:
                self._fail(error)
                return
            for key, entries in pages.items():
                if key in self._positions:
                    self._positions[key] = entries[-1][0].decode()
                for follower in self._by_key.get(key, ()):
                    follower.give(entries)

    def _fail(self, error: BaseException) -> None:
        self._reader = None
        for followers in self._by_key.values():
            for follower in followers:
                follower.failure = error
                follower.woken.set()


async def read_after(client: redis.Redis, key: str, last: str) -> list[Entry]:
    """At most a page of the entries after an id, without waiting. Errors: REDIS_ERRORS."""
    return (await _read_streams(client, {key: last}, None)).get(key, [])


async def _read_streams(client: redis.Redis, positions: dict[str, str], block_ms: int | None) -> dict[str, list[Entry]]:
    answer = await cast(Awaitable[Any], client.xread(cast(Any, positions), count=PAGE, block=block_ms))
    found: dict[str, list[Entry]] = {}
    for name, entries in answer.items() if isinstance(answer, dict) else answer or ():
        page = entries[0] if entries and isinstance(entries[0], list) else entries
        if page:
            found[name.decode()] = page
    return found


def order(entry: bytes | str) -> tuple[int, int]:
    """An entry id as numbers, which order as the entries do."""
    text = entry.decode() if isinstance(entry, bytes) else entry
    first, _, second = text.partition("-")
    return int(first), int(second or 0)
