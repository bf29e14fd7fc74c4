"""Writer of one run's events to the event log, in order; events that Redis refuses are written once it takes them.

A full or a read-only Redis refuses for as long as it is one, while the stream goes on. A backlog is therefore not
sent with each new event, but tried with a single one from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from itertools import islice

from fleetstart.runtime.contract.process.tasks import end_tasks

from ...state.redis_client import REDIS_ERRORS
from .event_log import EVENTS_MAX, EventLog

BATCH_MAX = 64
"""Events of one transaction: a backlog of `EVENTS_MAX` takes 16 round trips, and none keeps Redis for long."""
RETRY_S = 0.2
"""Interval between attempts to write while Redis does not answer, or refuses."""


class EventWriter:
    def __init__(self, log: EventLog, claim: int) -> None:
        self._log = log
        self._claim = claim
        self._count = 0
        """Events that were added: the number of the last one."""
        self._written = 0
        """Number of the last event that Redis took."""
        self._waiting: deque[bytes] = deque(maxlen=EVENTS_MAX)
        """The last events, which Redis has not taken. Those before them would not stay in the log."""
        self._retrying: asyncio.Task[None] | None = None

    async def add(self, events: list[bytes]) -> None:
        """Writes events. If Redis does not take them they wait, and later ones behind them."""
        self._count += len(events)
        self._waiting += events
        if self._retrying is None:
            try:
                await self._write_all()
            except REDIS_ERRORS:
                self._retrying = asyncio.get_running_loop().create_task(self._retry())

    async def wait_written(self, gone: asyncio.Event) -> None:
        """Waits until Redis has taken all events, or until the call is `gone`."""
        while self._retrying is not None and not gone.is_set():
            await asyncio.wait([self._retrying], timeout=RETRY_S)

    async def close(self) -> None:
        """Gives up what waits."""
        if self._retrying is not None:
            await end_tasks([self._retrying])

    async def _retry(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._write(1)
                    await self._write_all()
        finally:
            self._retrying = None

    async def _write_all(self) -> None:
        """Writes all that waits. Errors: REDIS_ERRORS."""
        while self._waiting:
            await self._write(BATCH_MAX)

    async def _write(self, most: int) -> None:
        """Writes the first events that wait, at most so many. Errors: REDIS_ERRORS."""
        begin = self._count - len(self._waiting) + 1
        batch = list(islice(self._waiting, most))
        await self._log.append(self._claim, begin, batch, after_gap=begin > self._written + 1)
        self._written = begin + len(batch) - 1
        while self._waiting and self._count - len(self._waiting) < self._written:
            self._waiting.popleft()
