"""Writes of this node that wait until Redis has them: worker statuses, log lines, ledger rows.

Redis may be unavailable for any length of time: everything waits here and is written once it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerStatus

from ..processes.worker_logs import LogBuffer
from ..workers.meter import LedgerBuffer
from .redis_state import REDIS_ERRORS, NodeState

log = logging.getLogger(__name__)

LOG_BATCH_S = 0.05
ROWS_S = 1.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Backoff between attempts while Redis is unavailable: a node is back within a second of Redis' return."""


async def retries(what: str) -> AsyncIterator[int]:
    """Yields before each attempt, with growing pauses in between. An attempt that lasted counts as a success and
    resets the pauses."""
    failures = 0
    while True:
        began_s = time.monotonic()
        yield failures
        failures = 0 if time.monotonic() - began_s > PAUSES_S[-1] * 2 else failures + 1
        log.info("retrying", extra={"what": what, "failures": failures})
        await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])


class Outbox:
    """Buffers of one node, and the loops that write them."""

    def __init__(self, state: NodeState, logs: LogBuffer, ledger: LedgerBuffer) -> None:
        self._state = state
        self._logs = logs
        self._ledger = ledger
        self._pending: dict[WorkerId, WorkerStatus | None] = {}
        self._changed = asyncio.Event()

    def put(self, worker: WorkerId, status: WorkerStatus | None) -> None:
        """Queues a worker's current status; None deletes it."""
        self._pending[worker] = status
        self._changed.set()

    def put_all(self, statuses: dict[WorkerId, WorkerStatus]) -> None:
        """Queues all current statuses: a Redis that was down may have lost its latest writes."""
        self._pending = {**statuses, **self._pending}
        self._changed.set()

    async def write_statuses(self) -> None:
        async for _ in retries("writing statuses"):
            with contextlib.suppress(*REDIS_ERRORS):
                while True:
                    await self._changed.wait()
                    await self._flush_statuses()

    async def write_logs(self) -> None:
        async for _ in retries("writing logs"):
            with contextlib.suppress(*REDIS_ERRORS):
                while True:
                    await self._logs.arrived.wait()
                    await asyncio.sleep(LOG_BATCH_S)
                    await self._flush_logs()

    async def write_rows(self) -> None:
        async for _ in retries("writing the ledger"):
            with contextlib.suppress(*REDIS_ERRORS):
                while True:
                    await self._flush_rows()
                    await asyncio.sleep(ROWS_S)

    async def flush_all(self) -> None:
        """Writes everything that waits, once. Errors: REDIS_ERRORS."""
        await self._flush_statuses()
        await self._flush_logs()
        await self._flush_rows(durably=False)  # a daemon that ends does not wait for a disk

    async def _flush_statuses(self) -> None:
        changes = dict(self._pending)
        self._changed.clear()
        try:
            await self._state.write_statuses(changes)
        except BaseException:
            self._changed.set()
            raise
        for worker, written in changes.items():
            if worker in self._pending and self._pending[worker] is written:
                del self._pending[worker]

    async def _flush_logs(self) -> None:
        while batch := self._logs.take():
            try:
                await self._state.write_logs(batch)
            except BaseException:
                self._logs.put_back(batch)
                raise

    async def _flush_rows(self, *, durably: bool = True) -> None:
        while batch := self._ledger.peek():
            await self._state.write_rows(batch, durably=durably)
            self._ledger.drop(batch)
