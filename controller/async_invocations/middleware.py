"""The layer before the gateway: takes calls that ask to outlive their connection, and passes on all others untouched.

`Prefer: respond-async` makes a call an invocation of its own (`acceptance`, `runner`); `Idempotency-Key` makes sure
that a call which is sent again is not run again (`once`). A plain call pays a look at the names of its headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from fleetstart.runtime.contract.errors import FleetError, Refused, TooLarge, Unavailable, error_from
from fleetstart.runtime.contract.function.public_addresses import Network
from fleetstart.runtime.contract.ids import InvocationId, new_invocation_id

from ..http.asgi import RawHeaders, Receive, Scope, Send, respond_error
from ..http.headers import valid_request_id
from ..http.request_body import ClientDisconnected, header, read_body, reject_unread
from ..schemas.invocations import InvocationInfo
from ..state.redis_client import REDIS_ERRORS
from . import request_options as preferences
from .envelopes import envelope_of, fingerprint_of, identity_of
from .idempotency.middleware import IdempotentCall
from .idempotency.response_recorder import send_answer
from .request_options import RequestOptions
from .request_retention import RequestRetention
from .store.invocations import InvocationStore, StoredInvocation
from .store.payloads import REQUEST_MAX_BYTES, PayloadStore
from .submit import AsyncSubmitter

BODY_S = 60.0
"""How long the body of a call that is kept may take to arrive."""
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AsyncMiddleware:
    def __init__(
        self,
        gateway: App,
        acceptance: AsyncSubmitter,
        once: IdempotentCall,
        keeping: RequestRetention,
        book: InvocationStore,
        vault: PayloadStore,
        info: Callable[[StoredInvocation], InvocationInfo],
        *,
        allowed: Sequence[Network],
        max_body_bytes: int,
        stopping: asyncio.Event,
    ) -> None:
        self._gateway = gateway
        self._acceptance = acceptance
        self._once = once
        self._keeping = keeping
        self._book = book
        self._vault = vault
        self._info = info
        self._allowed = allowed
        self._max_body_bytes = max_body_bytes
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._gateway(scope, receive, send)
        elif preferences.has_options(scope["headers"]):
            await self._asking(scope, receive, send)
        elif self._keeping.functions and self._keeping.wanted(scope["path"]):
            await self._keeping.run(scope, receive, send)
        else:
            await self._gateway(scope, receive, send)

    async def _asking(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = valid_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        try:
            asked = preferences.read_options(scope["headers"], self._allowed)
            if not asked.nothing:
                limit_bytes = min(self._max_body_bytes, REQUEST_MAX_BYTES) if asked.respond_async else None
                async with asyncio.timeout(BODY_S):
                    body = await read_body(scope, receive, limit_bytes or self._max_body_bytes)
        except ClientDisconnected:
            return
        except TimeoutError:
            late = TooLarge(f"the request's body did not arrive within {BODY_S:g} s")
            await reject_unread(scope, receive, send, late, request_id)
            return
        except FleetError as error:
            await reject_unread(scope, receive, send, error, request_id)
            return
        try:
            if asked.nothing:
                await self._gateway(scope, receive, send)
            elif asked.key:
                await self._keyed(scope, send, asked, InvocationId(request_id), body)
            else:
                envelope = envelope_of(scope, InvocationId(request_id), body, asked)
                kept = await self._acceptance.accept(envelope, body)
                await self._answer_accepted(send, kept.id, asked.wait_s)
        except FleetError as error:
            await respond_error(send, error, request_id)
        except REDIS_ERRORS:
            gone = Unavailable("Redis does not answer, so nothing can be kept", retry_after_s=1)
            await respond_error(send, gone, request_id)

    async def _keyed(
        self, scope: Scope, send: Send, asked: RequestOptions, request_id: InvocationId, body: bytes
    ) -> None:
        invoker = identity_of(scope)
        mark = fingerprint_of(scope, body)

        async def accept(invocation: InvocationId) -> InvocationId:
            return (await self._acceptance.accept(envelope_of(scope, invocation, body, asked), body)).id

        async def answer(invocation: InvocationId, *, replayed: bool) -> bool:
            if replayed and await self._book.get(invocation) is None:
                return False
            extra: RawHeaders = [(b"idempotent-replayed", b"true")] if replayed else []
            await self._answer_accepted(send, invocation, asked.wait_s, extra)
            return True

        if asked.respond_async:
            await self._once.accept(
                invoker.project, asked.key, mark, request_id, accept=accept, answer=answer, send=send
            )
        else:
            await self._once.run(scope, body, send, invoker.project, asked.key, mark, request_id, answer=answer)

    async def _answer_accepted(
        self, send: Send, invocation: InvocationId, wait_s: int, extra: RawHeaders | None = None
    ) -> None:
        """The answer itself if it comes in time, else 202 and where to ask for it."""
        entry = await self._book.wait_ended(invocation, wait_s, self._stopping)
        if entry is None:
            raise Unavailable(f"invocation {invocation} is gone already", hint="give it a longer Fs-Ttl-S")
        headers: RawHeaders = [(b"x-request-id", invocation.encode()), *(extra or [])]
        if entry.progress.ended and wait_s:
            await answer_ended(send, self._vault, entry, headers)
            return
        info = msgspec.json.encode(self._info(entry))
        at = f"/api/v1/invocations/{invocation}".encode()
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(info)),
            (b"location", at),
            (b"link", b'<%s/events>; rel="monitor"' % at),
            (b"preference-applied", b"respond-async"),
        ]
        await send({"type": "http.response.start", "status": 202, "headers": headers})
        await send({"type": "http.response.body", "body": info, "more_body": False})


async def answer_ended(send: Send, vault: PayloadStore, entry: StoredInvocation, extra: RawHeaders) -> None:
    """What the function answered, or else the error that ended it. Errors: StoreFailed."""
    progress = entry.progress
    kept = await vault.answer(entry.envelope.id, progress.answer.claim) if progress.answer is not None else None
    if kept is not None:
        await send_answer(send, *kept, extra)
        return
    await respond_error(send, error_of_end(entry), "", extra)


class NotAnswered(Refused):
    """It ended before it was answered: cancelled, or not run in time."""

    code = "not_answered"
    status = 410


def error_of_end(entry: StoredInvocation) -> FleetError:
    progress = entry.progress
    if progress.error is not None and progress.status == "failed":
        return error_from(progress.error)
    message = progress.error.message if progress.error is not None else "it was cancelled before it was answered"
    return NotAnswered(f"invocation {entry.envelope.id} {progress.status}: {message}")
