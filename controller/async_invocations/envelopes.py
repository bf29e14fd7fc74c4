"""A call as it came in, made into what is kept of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import InvocationId

from ..http.asgi import Scope
from ..http.invoke_url import parse_target
from ..state.invocation_records import Envelope, Origin
from .request_options import Asked, fingerprint, kept_headers

CALLER = "fleetstart.caller"
"""Where the layer before ours says in the scope whose call it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    project: str = ""
    key: str = ""
    """Name of the API key."""


def caller_of(scope: Scope) -> Caller:
    caller = scope.get(CALLER)
    return caller if isinstance(caller, Caller) else Caller()


def target_of(scope: Scope) -> str:
    """Path and query as they were written."""
    path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = bytes(scope["query_string"]).decode("latin-1")
    return f"{path}?{query}" if query else path


def mark_of(scope: Scope, body: bytes) -> str:
    return fingerprint(caller_of(scope).project, scope["method"], target_of(scope), body)


def envelope_of(
    scope: Scope, invocation: InvocationId, body: bytes, asked: Asked, *, origin: Origin = "async"
) -> Envelope:
    caller = caller_of(scope)
    return Envelope(
        id=invocation,
        function=parse_target(scope["path"], scope.get("raw_path") or b"", b"").name,
        method=scope["method"],
        target=target_of(scope),
        headers=kept_headers(scope["headers"]),
        body_bytes=len(body),
        fingerprint=mark_of(scope, body),
        accepted_unix_ms=time.time_ns() // 1_000_000,
        queue_s=asked.queue_s,
        ttl_s=asked.ttl_s,
        origin=origin,
        webhook=asked.webhook,
        project=caller.project,
        key=caller.key,
    )
