"""Calls from function to function: the names in `calls`, and the messages between a worker and its gateway.

A worker has no network, so the gateway comes for its calls: while a call runs whose function may call others, the
gateway keeps a WebSocket open to the worker, with the worker's token and LINK_HEADER. One such link carries one call:

    worker → gateway     CallRequest (text), and the body as one binary message if there is one
    gateway → worker     AnswerHead (text), then the answer's bytes in binary messages, then a close with COMPLETE

A close with another code is an answer that broke off. A worker that closes its side cancels the call. The gateway says
with LINK_LIMIT_HEADER how large a message may be, and closes with TOO_BIG if a worker sends a larger one all the same.
"""

from __future__ import annotations

import msgspec

from .errors import InvalidSpec
from .function.names import full_name, project_of
from .ids import LIVE

CALLS_MAX = 32
"""Functions that one function may call: each is checked at every call."""
DEPTH_MAX = 8
"""Functions above a call. Each holds a worker while it waits, so that a deep chain is mostly paid for waiting."""
COMPLETE = 1000
TOO_BIG = 1009
BROKEN = 1011
"""Close codes (RFC 6455) of a whole answer, of a message above the gateway's limit, and of an answer that broke off."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a function makes."""

    grant: str
    """The secret of the call for which it is made (GRANT_HEADER)."""
    function: str
    """The callee; without a project, it is in the caller's."""
    version: str = LIVE
    """Version number or alias."""
    method: str
    path: str
    """Path and query inside the callee."""
    headers: list[tuple[str, str]] = []
    timeout_s: float | None = None
    number: int
    """How many equal calls (callee, path, body) the same call has made before."""
    has_body: bool


def split_callee(text: str) -> tuple[str, str]:
    """ "embed@3" → ("embed", "3"); without a version, the alias `live`."""
    name, _, version = text.partition("@")
    return name, version or LIVE


def check_calls(name: str, calls: list[str]) -> None:
    """Checks the setting `calls` of a function. Errors: InvalidSpec."""
    if len(calls) > CALLS_MAX:
        raise InvalidSpec(f"calls has {CALLS_MAX} functions at most, got {len(calls)}")
    for callee in calls:
        if "@" in callee:
            raise InvalidSpec(
                f"calls: {callee[:80]!r} names a version",
                hint=f"write calls=[{split_callee(callee)[0]!r}]; the call itself may name a version",
            )
        if full_name(callee, project_of(name)) == name:
            raise InvalidSpec(f"calls: function {name} names itself, and a function that calls itself is rejected")
    if len(set(calls)) < len(calls):
        raise InvalidSpec(f"calls names a function twice: {', '.join(calls)}")
