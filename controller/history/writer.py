"""The history writer: counts this gateway's calls by the minute and by the hour, and writes the counts once a second.

A call adds to counters in memory and never waits for Redis. While Redis is unavailable the counts stay; a gateway that
is killed loses those of its last second, which the ledger has all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import redis.asyncio as redis

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.ids import FunctionName

from ..state.redis_client import REDIS_ERRORS
from .call_counts import CallCounts
from .series import CELLS, MINUTE_MS
from .store import ALL, Cell, HistoryStore

log = logging.getLogger(__name__)

WRITE_S = 1.0
FLUSH_S = 1.0
"""Timeout for the last counts at shutdown."""
CELLS_MAX = 20_000
"""Cells held in memory at most, some ten megabytes: with Redis, those of the present minute and hour; without, the
newest of those that it does not have."""


class HistoryWriter:
    def __init__(self, client: redis.Redis, gateway: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store = HistoryStore(client)
        self._gateway = gateway
        self._clock = clock
        self._new: dict[tuple[FunctionName, int], CallCounts] = {}
        """Calls since the last batch, by function and minute."""
        self._cells: dict[Cell, CallCounts] = {}
        """In the order in which they were begun."""
        self._changed: set[Cell] = set()
        self._expiring: set[Cell] = set()
        """Cells that were written, so that their hash expires."""
        self._dropped = 0

    def ended(self, row: InvocationRow) -> None:
        """Counts a call, to the moment at which it ended here: a few additions, no I/O."""
        minute = int(self._clock() * 1000) // MINUTE_MS
        counts = self._new.get((row.function, minute))
        if counts is None:
            counts = self._new[row.function, minute] = CallCounts()
        counts.add(row)

    @property
    def cells(self) -> int:
        """Number of cells in memory."""
        return len(self._cells)

    def _add_new(self) -> None:
        """Adds the new calls to their cells: minute and hour, of their function and of all."""
        new, self._new = self._new, {}
        for (function, minute), counts in new.items():
            for name in (function, ALL):
                for resolution, size in CELLS.items():
                    cell = Cell(name, resolution, minute * MINUTE_MS // size.cell_ms)
                    known = self._cells.get(cell)
                    (self._begin(cell) if known is None else known).merge(counts)
                    self._changed.add(cell)

    def _begin(self, cell: Cell) -> CallCounts:
        if len(self._cells) >= CELLS_MAX:
            oldest = next(iter(self._cells))
            del self._cells[oldest]
            self._changed.discard(oldest)
            self._expiring.discard(oldest)
            self._dropped += 1
        counts = self._cells[cell] = CallCounts()
        return counts

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            with contextlib.suppress(*REDIS_ERRORS):  # the ledger writer has a line about it
                await self.write()

    async def flush(self) -> None:
        """Writes the last counts, after all calls have ended."""
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.write()
        except REDIS_ERRORS as error:
            log.warning("the last counts of the history were not written", extra={"error": str(error)})

    async def write(self) -> None:
        """Writes what has changed. Errors: REDIS_ERRORS; what was not written is written with the next batch."""
        self._add_new()
        changed, self._changed = self._changed, set()
        if changed:
            try:
                await self._store.write(
                    self._gateway, {cell: self._cells[cell] for cell in changed}, expire=changed - self._expiring
                )
                self._expiring |= changed & self._cells.keys()
            except BaseException:
                self._changed |= changed & self._cells.keys()
                raise
        self._forget_ended()

    def _forget_ended(self) -> None:
        now_unix_ms = int(self._clock() * 1000)
        for cell in [cell for cell in self._cells if cell.end_unix_ms <= now_unix_ms and cell not in self._changed]:
            del self._cells[cell]
            self._expiring.discard(cell)
        if self._dropped:
            log.warning("counts of the history were dropped: too many were held", extra={"cells": self._dropped})
            self._dropped = 0
