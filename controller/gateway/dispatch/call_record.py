"""Records an invocation: opened in the ledger on acceptance, closed with exactly one row.

A `CallRecord` is what became of one call: its attempts, its timeline, its outcome, its bill. Others read it; only its
own methods write it. The `CallRecorder` also reports to the schedulers when a version has become idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetstart.runtime.contract.billing.ledger import (
    CALLED_KEPT,
    CalledFunction,
    InvocationRow,
    InvocationTrace,
    OpenInvocation,
    StartKind,
    cost_nusd,
)
from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, WorkerId
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.contract.worker_headers import DEPTH_HEADER, GRANT_HEADER

from ...billing.ledger_writer import LedgerWriter
from ...http.request_context import TRACE
from ...state.records import StartOutcome
from ...state.view import View
from .grants import Grant, Grants
from .start_phases import add_start_phases
from .version_backend import BUSY_BACKOFF_NS, Attempt, Call, VersionBackend

CLIENT_CLOSED_REQUEST = 499
"""Status in the ledger of a call whose client disconnected; the code is nginx's."""
IDLE_REPORT_DELAY_S = 0.1
"""Between a version's last call and the report that it is idle: another call may be about to come."""


class CallRecorder:
    """Opens the records of a gateway's calls, and reports when versions become busy or idle."""

    def __init__(
        self,
        gateway: str,
        view: View,
        ledger: LedgerWriter,
        *,
        report_now: Callable[[], None],
        report_soon: Callable[[], None],
    ) -> None:
        """`report_now` and `report_soon` let the schedulers know of calls of an idle version, or of ended ones."""
        self.report_now = report_now
        self.grants = Grants(gateway)
        self.view = view
        self.ledger = ledger
        self._gateway = gateway
        self._report_soon = report_soon

    def open(self, backend: VersionBackend, call: Call) -> CallRecord:
        backend.recent.add(call.accepted_ns)
        backend.open_calls += 1
        self._opened(backend, call, self._gateway)
        return CallRecord(self, backend, call)

    def give_back(self, backend: VersionBackend, call: Call, gateway: str) -> None:
        """Leaves a call's row to the gateway that had it before, or to whoever closes the calls of that one."""
        self._opened(backend, call, gateway)

    def _opened(self, backend: VersionBackend, call: Call, gateway: str) -> None:
        self.ledger.opened(
            OpenInvocation(
                id=call.id,
                gateway=gateway,
                function=backend.key.name,
                version=backend.key.version,
                accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
                key=call.key,
                project=backend.spec.project,
                parent=call.parent,
                caller=call.caller,
                request_id=call.request_id,
                tags=backend.spec.tags,
            )
        )

    def closed(self, backend: VersionBackend) -> None:
        """A call of the version has ended."""
        backend.open_calls -= 1
        if len(self.view.gateways) > 1:
            self._report_soon()
        if backend.idle and not backend.idle_report_pending:
            self._report_idle_soon(backend)

    def _report_idle_soon(self, backend: VersionBackend) -> None:
        backend.idle_report_pending = True
        asyncio.get_running_loop().call_later(IDLE_REPORT_DELAY_S, self._report_idle, backend)

    def _report_idle(self, backend: VersionBackend) -> None:
        """The keep-alive counts from the last call, so the scheduler should know soon that there is none."""
        backend.idle_report_pending = False
        if not backend.idle:
            return
        if backend.peak:  # this report still counts the calls that there were, the next that they have ended
            self._report_idle_soon(backend)
        self._report_soon()


class CallRecord:
    """The attempts, timeline and outcome of one call. Written by its own methods alone."""

    __slots__ = ("_answered_ns", "_called", "_grant", "_recorder", "_refused", "attempt", "attempts", "backend",
                 "begun", "billed_ms", "call", "error", "events", "finished", "queue_ns", "start", "status",
                 "timeline")  # fmt: skip

    def __init__(self, recorder: CallRecorder, backend: VersionBackend, call: Call) -> None:
        self._recorder = recorder
        self.backend = backend
        self.call = call
        self.timeline = Timeline()
        self._answered_ns = 0
        """When a worker began to answer; 0 if none did."""
        self.attempt: Attempt | None = None
        """The attempt under way, or the last one."""
        self.attempts = 0
        self._refused = 0
        """Attempts at workers that were full or draining: they ran nothing."""
        self._grant: Grant | None = None
        """The right of the attempt under way to call other functions; None if its function calls none."""
        self._called: list[CalledFunction] = []
        self.queue_ns = 0
        self.start: StartKind | None = None
        """Hot, unless its worker got ready after the call came. A stream that moves stays what it began as."""
        self.begun = False
        """The response's head was sent: from then on the call cannot be tried again, only continued."""
        self.events: int | None = None
        """Events of the response that were sent; None if it is no event stream, which alone can tell its own end."""
        self.finished = False
        """Its row is written, and all that is left is to send the last bytes."""
        self.status = 0
        self.error = ""
        self.billed_ms = 0

    @property
    def attaches(self) -> bool:
        """Checks whether it is to go on with another gateway's call, and has nothing of its answer yet."""
        return self.call.keyed is not None and self.call.keyed.worker is not None and not self.begun

    # ── attempts ───────────────────────────────────────────────────────────────────────────────────

    def start_attempt(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.attempts += 1
        if self.call.stored is not None:
            self.call.stored.sent = True
        self.end_called()
        if self.backend.spec.calls:
            self._grant = self._recorder.grants.issue(self, attempt)
        if not self.begun:
            self.queue_ns = attempt.started_ns - self.call.accepted_ns
        if not self.backend.reported_busy:
            # The next periodic report may come after the keep-alive, and a WebSocket's worker would be drained.
            self.backend.reported_busy = True
            self._recorder.report_now()

    def release_for_retry(self, attempt: Attempt, backoff_ns: int, *, cut: bool = False) -> None:
        """Frees the slot of an attempt that failed; its worker gets no calls for a while.

        `cut`: it ended a stream that another worker continues. That is billed, unless the worker ran the platform's own
        code alone, a language model's.
        """
        self.end_called()
        now_ns = time.monotonic_ns()
        self.backend.avoid(attempt.worker, now_ns, backoff_ns)
        waive = not (cut and self.begun and self.backend.spec.llm is None)
        self.billed_ms += self.backend.release(attempt, now_ns, waive=waive, broke=True)

    def release_refused(self, attempt: Attempt) -> None:
        """Frees the slot of an attempt whose worker was full or draining. A handler may take another attempt for one
        that may have had effects, so this one does not count."""
        self._refused += 1
        self.backend.note_full(attempt.worker, time.monotonic_ns())
        self.release_for_retry(attempt, BUSY_BACKOFF_NS)

    @property
    def number(self) -> int:
        """Number of workers that it was sent to, without those that refused it; of the attempt under way, its own."""
        return self.attempts - self._refused

    def release(self, *, waive: bool, until_ns: int | None = None) -> None:
        """Frees the slot of the attempt under way, if there is one. Its time, to now or `until_ns`, is billed unless
        waived."""
        if self.attempt is not None and self.attempt.active:
            ended_ns = time.monotonic_ns() if until_ns is None else until_ns
            if not self._answered_ns and not self.finished:  # its client left, or its time was up, while it ran
                self.timeline.add("execute", self.attempt.started_ns, ended_ns)
            self.billed_ms += self.backend.release(self.attempt, ended_ns, waive=waive)

    def call_headers(self) -> list[tuple[str, str]]:
        """Headers for the worker about calls from function to function; none for a client's call of a function that
        calls no others."""
        headers = [(DEPTH_HEADER, str(len(self.call.chain)))] if self.call.chain else []
        return [*headers, (GRANT_HEADER, self._recorder.grants.header(self._grant))] if self._grant else headers

    def called(self, call: str, function: str, status: int, error: str, started_ns: int) -> None:
        """Notes a call that the function made, and that has ended now."""
        if self.finished:
            return
        now_ns = time.monotonic_ns()
        self.timeline.add("call", started_ns, now_ns)
        if len(self._called) < CALLED_KEPT:
            took_ms = (now_ns - started_ns) / 1e6
            self._called.append(
                CalledFunction(
                    id=InvocationId(call), function=FunctionName(function), status=status, error=error, took_ms=took_ms
                )
            )

    def end_called(self) -> None:
        """Ends the calls that the function makes in the attempt under way, and its right to make more."""
        if self._grant is not None:
            self._recorder.grants.end(self._grant)
            self._grant = None

    # ── the response ───────────────────────────────────────────────────────────────────────────────

    def answered(self, attempt: Attempt, status: int, error: str, now_ns: int) -> None:
        """A worker has begun to answer: the wait for it goes on the timeline."""
        self.status, self.error = status, error
        self._answered_ns = self._answered_ns or now_ns
        self.start = self.start_kind(attempt)
        self.timeline.add("queue", self.call.accepted_ns, attempt.started_ns)
        if self.start != "hot":
            self._add_start_phases(attempt, self.call.accepted_ns)
        self.timeline.add("execute", attempt.started_ns, now_ns)

    def continued(self, attempt: Attempt, lost_ns: int, now_ns: int) -> None:
        """Another worker continues a stream that lost its worker then."""
        if attempt.worker.ready_ns > lost_ns:
            self._add_start_phases(attempt, lost_ns)
        self.timeline.add("move", lost_ns, now_ns)

    def response_started(self, *, events: bool = False) -> None:
        """The response's head goes out now."""
        self.begun = True
        self.events = 0 if events else None

    def count_events(self, count: int) -> None:
        if self.events is not None:
            self.events += count

    def responded(self, head_ns: int, now_ns: int) -> None:
        """The response, or what there was of it before its worker was lost, has passed through."""
        self.timeline.add("respond", head_ns, now_ns)

    # ── the outcome ────────────────────────────────────────────────────────────────────────────────

    def set_outcome(self, status: int, error: str) -> None:
        self.status, self.error = status, error

    def fail(self, error: FleetError) -> None:
        """Ends the call with an error. A call that exceeded its deadline is billed for its time; others are not."""
        self.release(waive=not isinstance(error, DeadlineExceeded))
        if not self.finished:
            self.error = error.code
            self.status = self.status if self.begun else error.status
            self.finish()

    def finish(self) -> None:
        """Writes the call's row, once, before its last byte goes out: no client has a response without a row."""
        if not self.finished:
            self.finished = True
            now_ns = time.monotonic_ns()
            if not self._answered_ns:
                waited_until_ns = self.attempt.started_ns if self.attempt is not None else now_ns
                self.timeline.add("queue", self.call.accepted_ns, waited_until_ns)
            trace = self.trace(now_ns)
            if self.call.stored is not None:
                self.call.stored.row = trace.row
            self._recorder.ledger.ended(trace, self.start_outcome())

    def hand_over(self) -> None:
        """Leaves the call, which goes on at its worker, and its row to the gateway that goes on with it, or had it."""
        self.end_called()
        self.release(waive=True)
        if self.call.keyed is not None and self.attaches and not self.finished:
            self._recorder.give_back(self.backend, self.call, self.call.keyed.gateway)
        self.finished = True

    def close(self) -> None:
        """Closes the record, however the call ended."""
        self.end_called()
        self.release(waive=True)
        self.finish()
        self._recorder.closed(self.backend)

    # ── what is reported of it ─────────────────────────────────────────────────────────────────────

    @property
    def cost_nusd(self) -> int:
        device_type, device_bytes = self._device_use
        return cost_nusd(
            self.billed_ms, self.backend.spec.memory_bytes, self.call.price.execute_nusd_per_gib_s
        ) + cost_nusd(self.billed_ms, device_bytes, self.call.price.device_rate(device_type))

    @property
    def _device_use(self) -> tuple[str, int]:
        """Type and memory of the devices of the worker that served it last."""
        status = self.attempt.worker.status if self.attempt is not None else None
        return (status.device_type, status.device_bytes) if status is not None else ("", 0)

    def start_outcome(self) -> StartOutcome | None:
        """Time of the first byte, for the call that waited for this worker's start and was its first.

        None for a language model's unstreamed response, whose first byte comes with its last token.
        """
        attempt = self.attempt
        if attempt is None or not attempt.first_on_worker or self.number != 1 or self.start_kind(attempt) == "hot":
            return None
        answered_ns = self._answered_ns
        if not answered_ns or self.status >= 400 or (self.backend.spec.llm is not None and self.events is None):
            return None
        return StartOutcome(
            worker=attempt.worker.id,
            function=self.backend.key.name,
            version=self.backend.key.version,
            first_byte_unix_ms=(self.call.accepted_unix_ns + answered_ns - self.call.accepted_ns) // 1_000_000,
        )

    def trace(self, now_ns: int) -> InvocationTrace:
        """The row and trace of a call that has ended, as the ledger keeps them and `fs trace` shows them."""
        call, spec = self.call, self.backend.spec
        device_type, device_bytes = self._device_use
        worker = self.attempt.worker if self.attempt is not None else None
        start: StartKind = self.start_kind(self.attempt) if self.attempt is not None else "cold"
        answered_ns = self._answered_ns
        row = InvocationRow(
            id=call.id,
            function=self.backend.key.name,
            version=self.backend.key.version,
            worker=worker.id if worker is not None else WorkerId(""),
            status=self.status,
            error=self.error,
            start=start,
            accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
            queue_ms=(self.queue_ns if self.attempts else now_ns - call.accepted_ns) // 1_000_000,
            billed_ms=self.billed_ms,
            memory_bytes=spec.memory_bytes,
            device_type=device_type,
            device_bytes=device_bytes,
            device_rate_nusd_per_gib_s=call.price.device_rate(device_type),
            rate_nusd_per_gib_s=call.price.execute_nusd_per_gib_s,
            price=call.price.version,
            key=call.key,
            tags=spec.tags,
            project=spec.project,
            cost_nusd=self.cost_nusd,
            attempts=self.number,
            total_ms=(now_ns - call.accepted_ns) // 1_000_000,
            parent=call.parent,
            caller=call.caller,
            request_id=call.request_id,
            first_byte_ms=(answered_ns - call.accepted_ns) // 1_000_000 if answered_ns else None,
        )
        status = worker.status if worker is not None else None
        return InvocationTrace(
            row=row,
            timeline=self.timeline,
            isolation=status.isolation if status is not None else "",
            pooled=status.pooled if status is not None else False,
            events=self.events or 0,
            relayed=status.relayed if status is not None and start != "hot" else (),
            node=status.node if status is not None else "",
            fetched=status.fetched if status is not None and start != "hot" else {},
            second_engine=status.second_engine if status is not None else None,
            context=TRACE.get(),
            called=tuple(self._called),
        )

    def start_kind(self, attempt: Attempt) -> StartKind:
        """How the worker of the attempt was started for this call."""
        if self.start is not None:
            return self.start
        return attempt.worker.status.start if attempt.worker.ready_ns > self.call.accepted_ns else "hot"

    def _add_start_phases(self, attempt: Attempt, since_ns: int) -> None:
        status = attempt.worker.status
        add_start_phases(self.timeline, self.call, status, self._recorder.view.orders.get(status.worker), since_ns)
