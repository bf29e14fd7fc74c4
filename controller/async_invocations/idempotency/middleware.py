"""Idempotent calls: the first call with a key runs, all later ones get its response.

While the first one runs, the others wait for it, up to `WAIT_S`. A call with a key continues if its client disconnects.
Stored are responses of the handler that are neither a failure (5xx) nor a retryable rejection, up to `ANSWER_BYTES`;
streams are stored when complete. After anything else the key is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import InvocationId

from ...http.asgi import RawHeaders, Receive, Scope, Send
from ...http.scope import REPEAT_KEY
from ...state.redis_client import REDIS_ERRORS
from .response_recorder import ANSWER_BYTES, ResponseRecorder, replay_receive, send_answer
from .store import (
    KEPT_S,
    RENEW_S,
    AnswerNotKept,
    IdempotencyKeys,
    KeyBusy,
    KeyClaim,
    KeyMismatch,
    digest_of,
    new_claim,
    worth_keeping,
)

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long a call waits for an earlier one with the same key."""
LOOK_S = (0.02, 0.05, 0.1, 0.25)
"""Polling intervals of the earlier call's claim; the last one repeats."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AnswerAccepted(Protocol):
    async def __call__(self, invocation: InvocationId, *, replayed: bool) -> bool:
        """Answers with the state of an accepted invocation; False if it is not stored any more."""
        ...


class IdempotentCall:
    def __init__(self, gateway: App, claims: IdempotencyKeys) -> None:
        self._gateway = gateway
        self._claims = claims

    async def run(
        self,
        scope: Scope,
        body: bytes,
        send: Send,
        project: str,
        key: str,
        fingerprint: str,
        request_id: InvocationId,
        *,
        answer: AnswerAccepted,
    ) -> None:
        """Serves a synchronous call. Errors: KeyMismatch, KeyBusy, AnswerNotKept, StoreFailed, REDIS_ERRORS."""
        digest = digest_of(project, key)
        claim, raw = await self._claim(digest, send, new_claim(fingerprint, request_id), answer)
        if raw:
            await self._first(scope, body, send, digest, claim, raw)

    async def accept(
        self,
        project: str,
        key: str,
        fingerprint: str,
        request_id: InvocationId,
        *,
        accept: Callable[[InvocationId], Awaitable[InvocationId]],
        answer: AnswerAccepted,
        send: Send,
    ) -> None:
        """Serves an async call. Errors: those of `run` and of `accept`."""
        digest = digest_of(project, key)
        claim, raw = await self._claim(digest, send, new_claim(fingerprint, request_id), answer)
        if not raw:
            return
        try:
            accepted = await accept(claim.invocation)
        except BaseException:
            with contextlib.suppress(*REDIS_ERRORS):
                await self._claims.free(digest, raw)
            raise
        settled = msgspec.structs.replace(claim, state="async", invocation=accepted)
        await self._claims.settle(digest, raw, settled, b"")
        await answer(accepted, replayed=False)

    async def _claim(self, digest: str, send: Send, ours: KeyClaim, answer: AnswerAccepted) -> tuple[KeyClaim, bytes]:
        """Claims the key; returns the claim and its bytes. No bytes: the call was answered like an earlier one."""
        ends, looks = time.monotonic() + WAIT_S, 0
        standing = b""
        while True:
            claim, raw = await self._claims.take(digest, ours, standing)
            standing = b""
            if claim.owner == ours.owner:
                return claim, raw
            if claim.fingerprint != ours.fingerprint:
                raise KeyMismatch(
                    "this Idempotency-Key was used for a different call: function, path, method or body differ",
                    hint=f"use a key of its own for each call; keys are kept for {KEPT_S // 3600} h",
                )
            if claim.state == "done":
                kept = await self._claims.answer(digest, claim)
                if kept is not None:
                    await send_answer(send, *kept, _replayed(claim))
                    return claim, b""
            elif claim.state == "async":
                if await answer(claim.invocation, replayed=True):
                    return claim, b""
            elif claim.state == "unkept":
                raise AnswerNotKept(
                    f"the call with this Idempotency-Key was answered as {claim.invocation}, with more than the "
                    f"{ANSWER_BYTES:,} bytes that are kept",
                    hint="call with another key to run it again; Prefer: respond-async keeps larger answers",
                )
            if claim.state != "running":
                standing = raw  # what it was answered with is gone: it may be run again
                continue
            if time.monotonic() > ends:
                raise KeyBusy(
                    f"the call with this Idempotency-Key has run for more than {WAIT_S:g} s, as {claim.invocation}",
                    hint="try again after Retry-After seconds",
                    retry_after_s=5,
                )
            await asyncio.sleep(LOOK_S[min(looks, len(LOOK_S) - 1)])
            looks += 1

    async def _first(self, scope: Scope, body: bytes, send: Send, digest: str, claim: KeyClaim, raw: bytes) -> None:
        recorder: ResponseRecorder

        async def on_end() -> None:
            await self._settle(recorder, digest, claim, raw)

        recorder = ResponseRecorder(send, ANSWER_BYTES, on_end)
        keeper = asyncio.get_running_loop().create_task(self._renew(digest, raw))
        headers = [
            (name, value) for name, value in scope["headers"] if name not in (b"x-request-id", b"content-length")
        ]
        headers += [(b"x-request-id", claim.invocation.encode()), (b"content-length", b"%d" % len(body))]
        try:
            await self._gateway(
                {**scope, "headers": headers, REPEAT_KEY: digest}, replay_receive(body, asyncio.Event()), recorder
            )
        finally:
            keeper.cancel()
            if not recorder.whole:
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._claims.free(digest, raw)

    async def _renew(self, digest: str, raw: bytes) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(*REDIS_ERRORS):
                if not await self._claims.renew(digest, raw):
                    log.warning("an idempotency key was lost to another call", extra={"key": digest[:12]})
                    return

    async def _settle(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Stores the response. If store or Redis fail, only the copy is lost: the lease frees the key."""
        try:
            if not worth_keeping(recorder.status, ran=recorder.ran):
                await self._claims.free(digest, raw)
            elif recorder.too_large:
                await self._claims.settle(digest, raw, msgspec.structs.replace(claim, state="unkept"), b"")
            else:
                done = msgspec.structs.replace(claim, state="done", answer=recorder.answer())
                await self._claims.settle(digest, raw, done, bytes(recorder.body))
        except (*REDIS_ERRORS, FleetError) as error:
            log.warning("an answer could not be kept", extra={"invocation": claim.invocation, "error": str(error)})


def _replayed(claim: KeyClaim) -> RawHeaders:
    return [(b"idempotent-replayed", b"true"), (b"x-request-id", claim.invocation.encode())]
