"""Context of the current request: its id, and its place in a trace that may span several systems (W3C).

Set once, where a request comes in (`request_id_middleware`), and inherited by every task that is made for it. The trace
context of the client is taken over; without one, or with a broken one, a trace begins here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from secrets import token_hex

from fleetstart.runtime.contract.billing.ledger import TraceContext

REQUEST: ContextVar[str] = ContextVar("request", default="")
TRACE: ContextVar[TraceContext] = ContextVar("trace", default=TraceContext())  # noqa: B039 - frozen
GIVEN: ContextVar[str] = ContextVar("given", default="")
"""The caller's own id of the request, which log lines name beside the platform's."""
STATE_MAX_BYTES = 512
"""Longest tracestate that is passed on; W3C requires that much, and allows to drop what is longer."""

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(rb"[\x20-\x7e]*")
_SAMPLED = 1


def trace_context(parent: bytes | None, state: bytes | None, *, sample: bool, chance: str = "") -> TraceContext:
    """The trace context of a request with these headers.

    `sample`: a trace that begins here is recorded; `chance`: 48 random hex digits, if there are some already.
    """
    chance = chance or token_hex(24)
    span_id = chance[32:48]
    found = _TRACEPARENT.fullmatch(parent) if parent else None
    if found is None or not _valid(*found.groups()):
        return TraceContext(chance[:32], span_id, sampled=sample)
    kept = state.decode() if state and len(state) <= STATE_MAX_BYTES and _STATE.fullmatch(state) else ""
    return TraceContext(
        found[2].decode(),
        span_id,
        parent_id=found[3].decode(),
        sampled=bool(int(found[4], 16) & _SAMPLED),
        state=kept,
    )


def _valid(version: bytes, trace: bytes, span: bytes, flags: bytes, more: bytes | None) -> bool:
    """Zeros stand for nothing; what comes after the flags is for later versions of the format only."""
    return version != b"ff" and bool(trace.strip(b"0") and span.strip(b"0")) and (version != b"00" or more is None)


def traceparent(context: TraceContext) -> bytes:
    """The traceparent header for requests made on behalf of this one."""
    return f"00-{context.trace_id}-{context.span_id}-{'01' if context.sampled else '00'}".encode()


def log_fields() -> Mapping[str, str]:
    """Fields of every log line of the request."""
    request = REQUEST.get()
    if not request:
        return {}
    trace, given = TRACE.get(), GIVEN.get()
    fields = {"request": request, "trace": trace.trace_id} if trace.trace_id else {"request": request}
    return {**fields, "client_request": given} if given else fields
