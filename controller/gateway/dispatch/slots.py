"""How a call comes to a slot on a worker, and leaves it unserved; and what its waiting was, on its timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder

from .backend import Call, Route, Worker
from .call_summary import join_start, start_kind

DEATHS_ALLOWED = 3
"""A call that ended three workers would end the fourth: it must not eat workers for ever."""


class Seating:
    def __init__(
        self,
        *,
        demand: Callable[[], None],
        turned_away: Callable[[Route], FleetError],
        waited_out: Callable[[Route, Call], FleetError],
        order_of: Callable[[WorkerId], WorkerOrder | None],
    ) -> None:
        self._demand = demand
        self._turned_away = turned_away
        self._waited_out = waited_out
        self._order_of = order_of

    async def seat(self, route: Route, call: Call, *, again: bool) -> Worker:
        """A slot, now or in turn; `again` for a call that was handed back. Errors: as of `_turn`."""
        worker = route.take(call, time.monotonic_ns(), first=again)
        if worker is None:
            worker = await self._turn(route, call, again=again)
        call.attempts += 1
        if not call.begun:
            call.queue_ns = call.dispatched_ns - call.accepted_ns
        return worker

    async def _turn(self, route: Route, call: Call, *, again: bool) -> Worker:
        """Errors: QueueFull, Overloaded, QueueTimeout."""
        turn = route.wait_again(call) if again else route.wait(call)
        if turn is None:
            raise self._turned_away(route)
        self._demand()
        if again or not call.queue_ends_ns:
            return await turn
        try:
            async with asyncio.timeout((call.queue_ends_ns - time.monotonic_ns()) / 1e9):
                return await turn
        except TimeoutError:
            raise self._waited_out(route, call) from None

    def hand_back(self, route: Route, call: Call, worker: Worker, avoid_ns: int) -> None:
        """The call leaves its slot; the worker is passed over for a while."""
        now_ns = time.monotonic_ns()
        route.avoid(worker, now_ns, avoid_ns)
        route.leave(call, now_ns, waive=True)

    def close_queue(self, call: Call, worker: Worker) -> None:
        """Its worker begins to answer: what it waited for goes on its timeline."""
        call.start = start_kind(call, worker)
        call.timeline.add("queue", call.accepted_ns, call.dispatched_ns)
        if call.start != "hot":
            join_start(call, worker.status, self._order_of(worker.id), call.accepted_ns)

    def close_move(self, call: Call, worker: Worker, head_ns: int) -> None:
        if worker.ready_ns > call.lost_ns:
            join_start(call, worker.status, self._order_of(worker.id), call.lost_ns)
        call.timeline.add("move", call.lost_ns, head_ns)
