"""Builds the stored envelope of a call from its ASGI scope."""

from __future__ import annotations

import time

from fleetstart.runtime.contract.ids import InvocationId

from ..http.asgi import Scope
from ..http.invoke_url import parse_target
from ..http.scope import CALLER_IDENTITY, CallerIdentity
from ..state.invocation_records import Envelope, Origin
from .request_options import RequestOptions, fingerprint, kept_headers


def identity_of(scope: Scope) -> CallerIdentity:
    """The caller's project and key, from the auth middleware."""
    invoker = scope.get(CALLER_IDENTITY)
    return invoker if isinstance(invoker, CallerIdentity) else CallerIdentity()


def target_of(scope: Scope) -> str:
    """Path and query as the client wrote them."""
    path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = bytes(scope["query_string"]).decode("latin-1")
    return f"{path}?{query}" if query else path


def fingerprint_of(scope: Scope, body: bytes) -> str:
    return fingerprint(identity_of(scope).project, scope["method"], target_of(scope), body)


def envelope_of(
    scope: Scope, invocation: InvocationId, body: bytes, options: RequestOptions, *, origin: Origin = "async"
) -> Envelope:
    invoker = identity_of(scope)
    return Envelope(
        id=invocation,
        function=parse_target(scope["path"], scope.get("raw_path") or b"", b"").name,
        method=scope["method"],
        target=target_of(scope),
        headers=kept_headers(scope["headers"]),
        body_bytes=len(body),
        fingerprint=fingerprint_of(scope, body),
        accepted_unix_ms=time.time_ns() // 1_000_000,
        queue_s=options.queue_s,
        ttl_s=options.ttl_s,
        origin=origin,
        webhook=options.webhook,
        project=invoker.project,
        key=invoker.key,
    )
