"""Waits for an async invocation to end, by asking for it with `Prefer: wait`."""

from __future__ import annotations

import time
from urllib.parse import quote

import msgspec

from fleetstart.runtime.contract.errors import DeadlineExceeded

from ..schemas.invocations import InvocationInfo
from .api_client import Server, error_of

ENDED = frozenset(("succeeded", "failed", "cancelled", "expired"))
ASK_S = 20
"""Of one request: shorter than the client's own timeout."""


def ended(server: Server, invocation: str, *, timeout_s: float) -> InvocationInfo:
    """As it is when it has ended. Errors: DeadlineExceeded, NotFound, Unreachable."""
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0, min(ASK_S, round(ends_s - time.monotonic())))
        with server.reached():
            response = server.http.get(
                f"/api/v1/invocations/{quote(invocation, safe='')}", headers={"prefer": f"wait={left_s}"}
            )
        if response.is_error:
            raise error_of(response.status_code, response.content)
        info = msgspec.json.decode(response.content, type=InvocationInfo)
        if info.status in ENDED:
            return info
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(
                f"invocation {invocation} is {info.status} after {timeout_s:g} s",
                hint=f"fs invocations get {invocation}",
            )
