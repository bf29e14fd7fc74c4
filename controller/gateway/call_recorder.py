"""Records an invocation in the ledger: opened on acceptance, closed with exactly one row. Also tells the schedulers
when a version has become idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetstart.runtime.contract.billing.ledger import OpenInvocation
from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError

from ..billing.ledger_writer import LedgerWriter
from ..state.view import View
from .dispatch.backend import Call, VersionBackend
from .dispatch.call_summary import start_outcome, trace_of

IDLE_REPORT_DELAY_S = 0.1
"""After the last call of a version, until the scheduler hears that it has none: another may be about to come."""


class CallRecorder:
    """One a gateway."""

    def __init__(self, gateway: str, view: View, ledger: LedgerWriter, *, freed: Callable[[], None]) -> None:
        """`freed` is told when others should hear soon that calls have ended."""
        self._gateway = gateway
        self._view = view
        self._ledger = ledger
        self._freed = freed

    def open(self, backend: VersionBackend, call: Call) -> None:
        backend.arrived += 1
        self._ledger.opened(
            OpenInvocation(
                id=call.id,
                gateway=self._gateway,
                function=backend.key.name,
                version=backend.key.version,
                accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
                key=call.key,
                project=backend.spec.project,
            )
        )

    def detach(self, backend: VersionBackend, call: Call, *, waive: bool) -> None:
        """Wherever the call is, it is there no longer; harmless if it was nowhere."""
        backend.queue.remove(call)
        if call.worker is not None and call in call.worker.calls:
            never_sent = call.attempts == 0  # it was given a slot in the moment in which it stopped waiting
            call.billed_ms = backend.release(call, time.monotonic_ns(), waive=waive or never_sent)

    def record_failure(self, backend: VersionBackend, call: Call, error: FleetError) -> None:
        """What took too long is billed for what it took; what the platform could not do is not."""
        self.detach(backend, call, waive=not isinstance(error, DeadlineExceeded))
        if not any(phase.name == "queue" for phase in call.timeline.phases):
            call.timeline.add("queue", call.accepted_ns, call.dispatched_ns or time.monotonic_ns())
        if not call.finished:
            call.error = error.code
            call.status = call.status if call.begun else error.status
            self.record(backend, call)

    def record(self, backend: VersionBackend, call: Call) -> None:
        """Once a call, before its last byte goes out: whoever has an answer has a row."""
        if call.finished:
            return
        call.finished = True
        self._ledger.ended(trace_of(backend, call, time.monotonic_ns()), start_outcome(backend, call))

    def close(self, backend: VersionBackend, call: Call) -> None:
        """The last that is done for a call, however it ended."""
        self.detach(backend, call, waive=True)
        self.record(backend, call)
        if len(self._view.gateways) > 1:
            self._freed()
        if backend.idle and not backend.idle_report_pending:
            self._report_idle_soon(backend)

    def _report_idle_soon(self, backend: VersionBackend) -> None:
        backend.idle_report_pending = True
        asyncio.get_running_loop().call_later(IDLE_REPORT_DELAY_S, self._report_idle, backend)

    def _report_idle(self, backend: VersionBackend) -> None:
        """The keep-alive counts from the last call, so the scheduler should hear soon that there is none."""
        backend.idle_report_pending = False
        if not backend.idle:
            return
        if backend.peak:  # this report still tells of the calls that there were, the next that they have ended
            self._report_idle_soon(backend)
        self._freed()
