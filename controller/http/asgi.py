"""ASGI types, and responses of the gateway itself: errors, the bill's response headers, a stream's closing event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from math import ceil
from typing import Any

import msgspec

from fleetstart.runtime.contract.billing.ledger import StartKind, dollars
from fleetstart.runtime.contract.errors import ErrorBody, FleetError
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER, retry_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

NO_CONTENT = (204, 304)
"""Statuses of responses that have no body, whatever their headers say: a client takes one for the next response."""
OWN_EVENTS = "fs.own_events"
"""Message key: the events in this piece of a stream are the platform's. A handler may write events of their names."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a stream's closing event: the bill."""

    request_id: str
    billed_ms: int
    cost: str
    start: StartKind
    server_timing: str


def bill_headers(billed_ms: int, cost_nusd: int, server_timing: str) -> RawHeaders:
    return [
        (b"fs-billed-ms", b"%d" % billed_ms),
        (b"fs-cost", dollars(cost_nusd).encode()),
        (b"server-timing", server_timing.encode()),
    ]


def closing_event(bill: Bill) -> bytes:
    """The bill as a server-sent event; clients that don't know its name skip it."""
    return b"event: fleetstart\ndata: " + msgspec.json.encode(bill) + b"\n\n"


def error_event(error: FleetError, request_id: str) -> bytes:
    return b"event: error\ndata: " + error_json(error, request_id) + b"\n\n"


def error_json(error: FleetError, request_id: str) -> bytes:
    return msgspec.json.encode(ErrorBody.of(error, request_id))


def error_headers(error: FleetError, request_id: str) -> RawHeaders:
    headers = [(b"content-type", b"application/json"), (ERROR_HEADER.encode(), error.code.encode())]
    headers += retry_headers(error)
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    if error.retry_after_s is not None:
        after_s = max(0.0, error.retry_after_s)
        headers.append((b"retry-after", b"%d" % ceil(after_s)))
        headers.append((b"retry-after-ms", b"%d" % ceil(after_s * 1000)))  # which OpenAI's clients prefer
    return headers


async def respond_error(
    send: Send, error: FleetError, request_id: str, extra: RawHeaders | None = None, *, more: bool = False
) -> None:
    """Sends an error response. With `more` it is not ended: the caller ends it with an empty body."""
    body = error_json(error, request_id)
    headers = [*error_headers(error, request_id), (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more})
