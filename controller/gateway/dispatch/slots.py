"""Acquires a worker slot for a call, queueing if none is free; releases it for a retry; adds the wait to the
timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder

from .backend import Call, VersionBackend, Worker
from .call_summary import add_start_phases, start_kind

DEATHS_ALLOWED = 3
"""A call that ended three workers would end the fourth: it must not eat workers for ever."""


class SlotAcquirer:
    def __init__(
        self,
        *,
        demand: Callable[[], None],
        queue_full: Callable[[VersionBackend], FleetError],
        queue_timeout: Callable[[VersionBackend, Call], FleetError],
        order_of: Callable[[WorkerId], WorkerOrder | None],
    ) -> None:
        self._demand = demand
        self._queue_full = queue_full
        self._queue_timeout = queue_timeout
        self._order_of = order_of

    async def acquire(self, backend: VersionBackend, call: Call, *, again: bool) -> Worker:
        """Acquires a slot, at once or from the queue; `again` for a retry.

        Errors: QueueFull, Overloaded, QueueTimeout."""
        worker = backend.try_acquire(call, time.monotonic_ns(), first=again)
        if worker is None:
            worker = await self._wait_in_queue(backend, call, again=again)
        call.attempts += 1
        if not call.begun:
            call.queue_ns = call.dispatched_ns - call.accepted_ns
        return worker

    async def _wait_in_queue(self, backend: VersionBackend, call: Call, *, again: bool) -> Worker:
        """Errors: QueueFull, Overloaded, QueueTimeout."""
        turn = backend.requeue(call) if again else backend.enqueue(call)
        if turn is None:
            raise self._queue_full(backend)
        self._demand()
        if again or not call.queue_ends_ns:
            return await turn
        try:
            async with asyncio.timeout((call.queue_ends_ns - time.monotonic_ns()) / 1e9):
                return await turn
        except TimeoutError:
            raise self._queue_timeout(backend, call) from None

    def release_for_retry(self, backend: VersionBackend, call: Call, worker: Worker, avoid_ns: int) -> None:
        """The call leaves its slot; the worker is passed over for a while."""
        now_ns = time.monotonic_ns()
        backend.avoid(worker, now_ns, avoid_ns)
        backend.release(call, now_ns, waive=True)

    def record_queue_phase(self, call: Call, worker: Worker) -> None:
        """Its worker begins to answer: what it waited for goes on its timeline."""
        call.start = start_kind(call, worker)
        call.timeline.add("queue", call.accepted_ns, call.dispatched_ns)
        if call.start != "hot":
            add_start_phases(call, worker.status, self._order_of(worker.id), call.accepted_ns)

    def record_move_phase(self, call: Call, worker: Worker, head_ns: int) -> None:
        if worker.ready_ns > call.lost_ns:
            add_start_phases(call, worker.status, self._order_of(worker.id), call.lost_ns)
        call.timeline.add("move", call.lost_ns, head_ns)
