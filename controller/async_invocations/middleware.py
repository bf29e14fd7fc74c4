"""ASGI middleware before the gateway: async and idempotent calls. Passes all other calls on unchanged.

`Prefer: respond-async` makes a call an async invocation (`submit`, `runner`); with `Idempotency-Key` repeated calls run
once (`idempotency`). A plain call costs a scan of its header names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from fleetstart.runtime.contract.errors import FleetError, Refused, TooLarge, Unavailable, error_from
from fleetstart.runtime.contract.function.public_addresses import Network
from fleetstart.runtime.contract.ids import InvocationId, Version, new_invocation_id

from ..http.asgi import RawHeaders, Receive, Scope, Send, respond_error
from ..http.body_budget import BodyBudget
from ..http.headers import valid_request_id
from ..http.invoke_url import Target, parse_target
from ..http.request_body import ClientDisconnected, declared_bytes, header, read_body, reject_unread
from ..schemas.invocations import InvocationInfo
from ..state.redis_client import REDIS_ERRORS, unavailable
from . import request_options
from .idempotency.middleware import IdempotentCall
from .idempotency.response_recorder import send_answer
from .replay_recorder import ReplayRecorder
from .request_options import RequestOptions
from .store.invocations import InvocationStore, StoredInvocation
from .store.payloads import REQUEST_MAX_BYTES, PayloadStore
from .submit import AsyncSubmitter, envelope_of, fingerprint_of, identity_of

BODY_S = 60.0
"""Timeout for receiving the body of an async or idempotent call."""
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AsyncMiddleware:
    def __init__(
        self,
        gateway: App,
        submitter: AsyncSubmitter,
        idempotent: IdempotentCall,
        replay_recorder: ReplayRecorder,
        invocations: InvocationStore,
        payloads: PayloadStore,
        info: Callable[[StoredInvocation], InvocationInfo],
        *,
        bodies: BodyBudget,
        require_function: Callable[[Target, str], Awaitable[Version]],
        allowed: Sequence[Network],
        max_body_bytes: int,
        stopping: asyncio.Event,
    ) -> None:
        self._gateway = gateway
        self._submitter = submitter
        self._idempotent = idempotent
        self._replay_recorder = replay_recorder
        self._invocations = invocations
        self._payloads = payloads
        self._info = info
        self._bodies = bodies
        self._require_function = require_function
        self._allowed = allowed
        self._max_body_bytes = max_body_bytes
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._gateway(scope, receive, send)
        elif request_options.has_options(scope["headers"]):
            await self._asking(scope, receive, send)
        elif self._replay_recorder.functions and self._replay_recorder.wanted(scope["path"]):
            await self._replay_recorder.run(scope, receive, send)
        else:
            await self._gateway(scope, receive, send)

    async def _asking(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = valid_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        try:
            options = request_options.read_options(scope["headers"], self._allowed)
        except FleetError as error:
            await reject_unread(scope, receive, send, error, request_id)
            return
        if options.nothing:
            await self._gateway(scope, receive, send)
            return
        held = self._bodies.open()
        try:
            limit_bytes = (
                min(self._max_body_bytes, REQUEST_MAX_BYTES) if options.respond_async else self._max_body_bytes
            )
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            first = await self._require_function(target, request_id)
            self._bodies.require_room(declared_bytes(scope))
            async with asyncio.timeout(BODY_S):
                body = await read_body(scope, receive, limit_bytes, held=held)
        except ClientDisconnected:
            held.release()
            return
        except (TimeoutError, FleetError) as error:
            held.release()
            refusal = (
                error
                if isinstance(error, FleetError)
                else TooLarge(f"the request's body did not arrive within {BODY_S:g} s")
            )
            await reject_unread(scope, receive, send, refusal, request_id)
            return
        try:
            await self._accept(scope, send, options, InvocationId(request_id), body, first)
        except FleetError as error:
            await respond_error(send, error, request_id)
        except REDIS_ERRORS as error:
            await respond_error(send, unavailable(error, "so nothing can be kept"), request_id)
        finally:
            held.release()

    async def _accept(
        self, scope: Scope, send: Send, options: RequestOptions, request_id: InvocationId, body: bytes, first: Version
    ) -> None:
        if options.key:
            await self._keyed(scope, send, options, request_id, body, first)
        else:
            kept = await self._submitter.accept(envelope_of(scope, request_id, body, options), body)
            await self._answer_accepted(send, kept.id, options.wait_s)

    async def _keyed(
        self, scope: Scope, send: Send, options: RequestOptions, request_id: InvocationId, body: bytes, first: Version
    ) -> None:
        invoker = identity_of(scope)
        mark = fingerprint_of(scope, body)

        async def accept(invocation: InvocationId) -> InvocationId:
            return (await self._submitter.accept(envelope_of(scope, invocation, body, options), body)).id

        async def answer(invocation: InvocationId, *, replayed: bool) -> bool:
            if replayed and await self._invocations.get(invocation) is None:
                return False
            extra: RawHeaders = [(b"idempotent-replayed", b"true")] if replayed else []
            await self._answer_accepted(send, invocation, options.wait_s, extra)
            return True

        if options.respond_async:
            await self._idempotent.accept(
                invoker.project, options.key, mark, request_id, first=first, accept=accept, answer=answer, send=send
            )
        else:
            await self._idempotent.run(
                scope,
                body,
                send,
                invoker.project,
                options.key,
                mark,
                request_id,
                first=first,
                last=options.last,
                answer=answer,
            )

    async def _answer_accepted(
        self, send: Send, invocation: InvocationId, wait_s: int, extra: RawHeaders | None = None
    ) -> None:
        """Answers with the response if it comes within `wait_s`, else with 202 and the invocation's URL."""
        entry = await self._invocations.wait_ended(invocation, wait_s, self._stopping)
        if entry is None:
            raise Unavailable(f"invocation {invocation} is gone already", hint="give it a longer Fs-Ttl-S")
        headers: RawHeaders = [(b"x-request-id", invocation.encode()), *(extra or [])]
        if entry.progress.ended and wait_s:
            await answer_ended(send, self._payloads, entry, headers)
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


async def answer_ended(send: Send, payloads: PayloadStore, entry: StoredInvocation, extra: RawHeaders) -> None:
    """Sends the function's response, or the error that ended the invocation. Errors: StoreFailed."""
    progress = entry.progress
    kept = await payloads.answer(entry.envelope.id, progress.answer.claim) if progress.answer is not None else None
    if kept is not None:
        await send_answer(send, *kept, extra)
        return
    await respond_error(send, error_of_end(entry), "", extra)


class NotAnswered(Refused):
    """The invocation ended without a response: cancelled, or not run in time."""

    code = "not_answered"
    status = 410


def error_of_end(entry: StoredInvocation) -> FleetError:
    progress = entry.progress
    if progress.error is not None and progress.status == "failed":
        return error_from(progress.error)
    message = progress.error.message if progress.error is not None else "it was cancelled before it was answered"
    return NotAnswered(f"invocation {entry.envelope.id} {progress.status}: {message}")
