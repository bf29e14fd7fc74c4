"""Accepts calls to be run later: checked as the gateway would, and on the disk before anybody is told so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

from fleetstart.runtime.contract.errors import QueueFull, Refused, TooLarge, Unavailable

from ..http.invoke_url import Target, parse_target
from ..state.invocation_records import Envelope
from ..state.redis_client import REDIS_ERRORS
from .store import lifecycle
from .store.invocations import InvocationStore
from .store.payloads import HEAD_MAX_BYTES, REQUEST_MAX_BYTES, PayloadStore

Check = Callable[[Target, str, int], Awaitable[None]]
"""Whether a call of that target, request id and size would be served at all; raises what the caller would be told."""


class RequestIdTaken(Refused):
    """Another call has that request id."""

    code = "request_id_taken"
    status = 409


class AsyncSubmitter:
    def __init__(self, book: InvocationStore, vault: PayloadStore, check: Check) -> None:
        self._book = book
        self._vault = vault
        self._check = check

    async def accept(self, envelope: Envelope, body: bytes) -> Envelope:
        """Stores the call and returns the stored envelope: this one, or that of the same call accepted before.

        Errors: those of the gateway's admission (NotFound, ...), TooLarge, RequestIdTaken, QueueFull, StoreFailed;
        Unavailable while Redis does not answer.
        """
        path, _, query = envelope.target.partition("?")
        await self._check(
            parse_target(unquote(path), path.encode("latin-1"), query.encode("latin-1")), envelope.id, len(body)
        )
        if len(body) > REQUEST_MAX_BYTES or len(msgspec.json.encode(envelope)) > HEAD_MAX_BYTES:
            raise TooLarge(
                f"an async call has {REQUEST_MAX_BYTES:,} bytes of body and {HEAD_MAX_BYTES:,} of headers at most",
                hint="send a reference to the data instead",
            )
        try:
            known = await self._book.get(envelope.id)
            kept = known.envelope if known is not None else await self._keep(envelope, body)
        except REDIS_ERRORS as error:
            raise Unavailable("Redis does not answer, so nothing can be accepted", retry_after_s=1) from error
        if kept.fingerprint != envelope.fingerprint:
            raise RequestIdTaken(
                f"invocation {envelope.id} is another call already",
                hint="leave X-Request-Id out, or give each call its own",
            )
        return kept

    async def _keep(self, envelope: Envelope, body: bytes) -> Envelope:
        """What lies there afterwards. What is refused after all must not be taken up from the store later."""
        kept = await self._vault.keep_request(envelope, body)
        if kept.fingerprint == envelope.fingerprint:
            try:
                await self._book.create(kept, lifecycle.accepted(kept))
            except (QueueFull, *REDIS_ERRORS):
                if kept is envelope:
                    await self._vault.drop(envelope.id)
                raise
        return kept
