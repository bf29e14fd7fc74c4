"""The platform's part of a call's response: its headers, its bill, and the error in place of an answer."""

from __future__ import annotations

from fleetstart.runtime.contract.billing.ledger import dollars
from fleetstart.runtime.contract.errors import FleetError

from ...http.asgi import OWN_EVENTS, Bill, RawHeaders, Send, error_event, respond_error
from ...http.asgi import bill_headers as headers_of_bill
from ...http.asgi import closing_event as event_of_bill
from .call_record import CallRecord


def platform_headers(record: CallRecord) -> RawHeaders:
    """Headers that are known before the call's bill: request id, version, kind of start, number of attempts."""
    headers = [(b"x-request-id", record.call.id.encode()), (b"fs-version", b"%d" % record.backend.key.version)]
    if record.attempt is not None:
        headers.append((b"fs-start", record.start_kind(record.attempt).encode()))
        headers.append((b"fs-attempts", b"%d" % record.number))
    return headers


def bill_headers(record: CallRecord) -> RawHeaders:
    """Headers with what the call cost, and where its time went."""
    return headers_of_bill(record.billed_ms, record.cost_nusd, record.timeline.server_timing())


def closing_event(record: CallRecord) -> bytes:
    """The bill of an event stream, as its last event."""
    assert record.attempt is not None
    return event_of_bill(
        Bill(
            request_id=record.call.id,
            billed_ms=record.billed_ms,
            cost=dollars(record.cost_nusd),
            start=record.start_kind(record.attempt),
            server_timing=record.timeline.server_timing(),
        )
    )


async def send_error(record: CallRecord, error: FleetError, send: Send) -> None:
    """Sends the error as the response, or into an event stream that has begun; other responses stay truncated."""
    if not record.begun:
        headers = platform_headers(record)[1:] + bill_headers(record)
        await respond_error(send, error, record.call.id, headers)
    elif record.events is not None and record.attempt is not None:
        last = error_event(error, record.call.id) + closing_event(record)
        await send({"type": "http.response.body", "body": b"\n\n" + last, "more_body": False, OWN_EVENTS: True})
