"""Submission of async calls: builds a stored envelope, checks the call as the gateway would, and stores it.

A call is stored before it is acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

from fleetstart.runtime.contract.errors import QueueFull, TooLarge
from fleetstart.runtime.contract.ids import InvocationId, Version

from ..http.asgi import Scope
from ..http.invoke_url import Target, parse_target
from ..http.scope import CALLER_IDENTITY, GIVEN_REQUEST_ID, CallerIdentity
from ..state.invocation_records import Envelope, Origin
from ..state.redis_client import REDIS_ERRORS, unavailable
from .request_options import RequestOptions, fingerprint, kept_headers
from .store import lifecycle
from .store.invocations import InvocationStore
from .store.payloads import HEAD_MAX_BYTES, REQUEST_MAX_BYTES, PayloadStore
from .store.redis_clock import RedisClock

Check = Callable[[Target, str, int], Awaitable[Version]]
"""The version to which the gateway would send a call of that target, request id and size; raises its error if none."""


class AsyncSubmitter:
    def __init__(self, invocations: InvocationStore, payloads: PayloadStore, check: Check, clock: RedisClock) -> None:
        """`clock`: that by which runners read when a call is due. This machine's own may be hours away from it."""
        self._invocations = invocations
        self._payloads = payloads
        self._check = check
        self._clock = clock

    async def accept(self, envelope: Envelope, body: bytes) -> Envelope:
        """Stores the call and returns the stored envelope: this one, or that of the same call accepted before.

        Errors: those of the gateway's admission (NotFound, ...), TooLarge, QueueFull, StoreFailed;
        Unavailable while Redis does not answer.
        """
        path, _, query = envelope.target.partition("?")
        version = await self._check(
            parse_target(unquote(path), path.encode("latin-1"), query.encode("latin-1")), envelope.id, len(body)
        )
        envelope = msgspec.structs.replace(envelope, version=version)
        if len(body) > REQUEST_MAX_BYTES or len(msgspec.json.encode(envelope)) > HEAD_MAX_BYTES:
            raise TooLarge(
                f"an async call has {REQUEST_MAX_BYTES:,} bytes of body and {HEAD_MAX_BYTES:,} of headers at most",
                hint="send a reference to the data instead",
            )
        try:
            known = await self._invocations.get(envelope.id)
            return known.envelope if known is not None else await self._keep(envelope, body)
        except REDIS_ERRORS as error:
            raise unavailable(error, "so nothing can be accepted") from error

    async def _keep(self, envelope: Envelope, body: bytes) -> Envelope:
        """Stores the call; returns the stored envelope. A rejected call is deleted, so that no recovery restores it."""
        await self._clock.refresh()
        envelope = msgspec.structs.replace(envelope, accepted_unix_ms=self._clock.now_unix_ms())
        kept = await self._payloads.keep_request(envelope, body)
        if kept.fingerprint == envelope.fingerprint:
            try:
                await self._invocations.create(kept, lifecycle.accepted(kept))
            except (QueueFull, *REDIS_ERRORS):
                if kept is envelope:
                    await self._payloads.drop(envelope.id)
                raise
        return kept


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
    return fingerprint(identity_of(scope).project, scope["method"], target_of(scope), scope["headers"], body)


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
        request_id=scope.get(GIVEN_REQUEST_ID, ""),
    )
