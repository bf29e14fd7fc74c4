"""What is told of a call besides its answer: how its worker started, its timeline, its bill, and its error.

Read off the call and its backend, when the answer begins and when it ends. Who calls these is `invoke` and the gateway.
"""

from __future__ import annotations

from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, StartKind, cost_nusd, dollars
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.timeline import Timeline

from ...http.asgi import Bill, RawHeaders, Send, bill_headers, closing_event, error_event, respond_error
from ...http.request_context import TRACE
from ...state.records import StartOutcome
from .backend import Call, VersionBackend, Worker


def start_kind(call: Call, worker: Worker) -> StartKind:
    """hot unless the worker got ready after the call came. A stream that moves stays what it began as."""
    if call.start is not None:
        return call.start
    return worker.status.start if worker.ready_ns > call.accepted_ns else "hot"


def start_outcome(backend: VersionBackend, call: Call) -> StartOutcome | None:
    """Of a call that waited for its worker's start and was its first, when its answer began. A language model's whole
    answer begins with its last token, and says nothing of the first."""
    worker = call.worker
    if worker is None or not call.opened or call.attempts != 1 or start_kind(call, worker) == "hot":
        return None
    answered_ns = next((phase.ended_ns for phase in call.timeline.phases if phase.name == "execute"), 0)
    if not answered_ns or call.status >= 400 or (backend.spec.llm is not None and not call.events):
        return None
    return StartOutcome(
        worker=worker.id,
        function=backend.key.name,
        version=backend.key.version,
        first_byte_unix_ms=(call.accepted_unix_ns + answered_ns - call.accepted_ns) // 1_000_000,
    )


def first_byte_ms(call: Call) -> int | None:
    """From acceptance until a worker began to answer, whatever it answered; None if none did."""
    answered_ns = next((phase.ended_ns for phase in call.timeline.phases if phase.name == "execute"), 0)
    return (answered_ns - call.accepted_ns) // 1_000_000 if answered_ns else None


def add_start_phases(call: Call, status: WorkerStatus, order: WorkerOrder | None, since_ns: int) -> None:
    """Puts the start that the call has waited for since then on its timeline, as far as it fell into that time."""
    decided_unix_ns = order.decided_unix_ns or order.ordered_unix_ns if order is not None else 0
    placed_ns = call.accepted_ns + decided_unix_ns - call.accepted_unix_ns
    if placed_ns > since_ns:
        call.timeline.add("place", since_ns, placed_ns)
    joined = Timeline(origin_unix_ns=call.timeline.origin_unix_ns)
    joined.join(status.timeline)
    for phase in joined.phases:
        if phase.ended_ns > since_ns:
            call.timeline.add(phase.name, max(phase.started_ns, since_ns), phase.ended_ns)


def platform_headers(backend: VersionBackend, call: Call, worker: Worker | None) -> RawHeaders:
    headers = [(b"x-request-id", call.id.encode()), (b"fs-version", b"%d" % backend.key.version)]
    if worker is not None:
        headers.append((b"fs-start", start_kind(call, worker).encode()))
    return headers


def cost(backend: VersionBackend, call: Call) -> int:
    return cost_nusd(call.billed_ms, backend.spec.memory_bytes, call.price.execute_nusd_per_gib_s)


def bill(backend: VersionBackend, call: Call, worker: Worker) -> Bill:
    return Bill(
        request_id=call.id,
        billed_ms=call.billed_ms,
        cost=dollars(cost(backend, call)),
        start=start_kind(call, worker),
        server_timing=call.timeline.server_timing(),
    )


def trace_of(backend: VersionBackend, call: Call, now_ns: int) -> InvocationTrace:
    """What the ledger keeps of a call that has ended, and `fs trace` shows."""
    worker = call.worker
    row = InvocationRow(
        id=call.id,
        function=backend.key.name,
        version=backend.key.version,
        worker=worker.id if worker is not None else WorkerId(""),
        status=call.status,
        error=call.error,
        start=start_kind(call, worker) if worker is not None else "cold",
        accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
        queue_ms=(call.queue_ns if call.attempts else now_ns - call.accepted_ns) // 1_000_000,
        billed_ms=call.billed_ms,
        memory_bytes=backend.spec.memory_bytes,
        rate_nusd_per_gib_s=call.price.execute_nusd_per_gib_s,
        price=call.price.version,
        key=call.key,
        tags=backend.spec.tags,
        project=backend.spec.project,
        cost_nusd=cost(backend, call),
        attempts=call.attempts,
        total_ms=(now_ns - call.accepted_ns) // 1_000_000,
        first_byte_ms=first_byte_ms(call),
    )
    status = worker.status if worker is not None else None
    return InvocationTrace(
        row=row,
        timeline=call.timeline,
        isolation=status.isolation if status is not None else "",
        pooled=status.pooled if status is not None else False,
        events=call.event_count,
        relayed=status.relayed if status is not None and row.start != "hot" else (),
        node=status.node if status is not None else "",
        fetched=status.fetched if status is not None and row.start != "hot" else {},
        context=TRACE.get(),
    )


async def answer_error(backend: VersionBackend, call: Call, error: FleetError, send: Send) -> None:
    """The error as the call's answer; into the stream if it has begun; any other begun answer is left to be cut."""
    if not call.begun:
        extra = platform_headers(backend, call, call.worker)[1:]
        extra += bill_headers(call.billed_ms, cost(backend, call), call.timeline.server_timing())
        await respond_error(send, error, call.id, extra)
    elif call.events and call.worker is not None:
        last = error_event(error, call.id) + closing_event(bill(backend, call, call.worker))
        await send({"type": "http.response.body", "body": b"\n\n" + last, "more_body": False})
