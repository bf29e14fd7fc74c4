"""A call's entry in the books, from its acceptance to its one row; and when schedulers hear that calls have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetstart.runtime.contract.billing.ledger import OpenInvocation
from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError

from ..billing.ledger_writer import LedgerWriter
from ..state.view import View
from .dispatch.backend import Call, Route
from .dispatch.call_summary import first_answer, trace_of

REST_S = 0.1
"""After the last call of a version, until the scheduler hears that it has none: another may be about to come."""


class Books:
    """One a gateway."""

    def __init__(self, gateway: str, view: View, ledger: LedgerWriter, *, freed: Callable[[], None]) -> None:
        """`freed` is told when others should hear soon that calls have ended."""
        self._gateway = gateway
        self._view = view
        self._ledger = ledger
        self._freed = freed

    def open(self, route: Route, call: Call) -> None:
        route.arrived += 1
        self._ledger.opened(
            OpenInvocation(
                id=call.id,
                gateway=self._gateway,
                function=route.key.name,
                version=route.key.version,
                accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
                key=call.key,
                project=route.spec.project,
            )
        )

    def leave(self, route: Route, call: Call, *, waive: bool) -> None:
        """Wherever the call is, it is there no longer; harmless if it was nowhere."""
        route.queue.remove(call)
        if call.worker is not None and call in call.worker.calls:
            never_sent = call.attempts == 0  # it was given a slot in the moment in which it stopped waiting
            call.billed_ms = route.leave(call, time.monotonic_ns(), waive=waive or never_sent)

    def end_badly(self, route: Route, call: Call, error: FleetError) -> None:
        """What took too long is billed for what it took; what the platform could not do is not."""
        self.leave(route, call, waive=not isinstance(error, DeadlineExceeded))
        if not any(phase.name == "queue" for phase in call.timeline.phases):
            call.timeline.add("queue", call.accepted_ns, call.dispatched_ns or time.monotonic_ns())
        if not call.finished:
            call.error = error.code
            call.status = call.status if call.begun else error.status
            self.book(route, call)

    def book(self, route: Route, call: Call) -> None:
        """Once a call, before its last byte goes out: whoever has an answer has a row."""
        if call.finished:
            return
        call.finished = True
        self._ledger.ended(trace_of(route, call, time.monotonic_ns()), first_answer(route, call))

    def close(self, route: Route, call: Call) -> None:
        """The last that is done for a call, however it ended."""
        self.leave(route, call, waive=True)
        self.book(route, call)
        if len(self._view.gateways) > 1:
            self._freed()
        if route.idle and not route.telling:
            self._tell_rest_soon(route)

    def _tell_rest_soon(self, route: Route) -> None:
        route.telling = True
        asyncio.get_running_loop().call_later(REST_S, self._tell_rest, route)

    def _tell_rest(self, route: Route) -> None:
        """The keep-alive counts from the last call, so the scheduler should hear soon that there is none."""
        route.telling = False
        if not route.idle:
            return
        if route.peak:  # this report still tells of the calls that there were, the next that they have ended
            self._tell_rest_soon(route)
        self._freed()
