"""A call with an idempotency key: the first one runs, all others get what it was answered.

While the first is under way, the others wait for it for a while. A client that leaves does not end a call with a key:
it will ask again. An answer is kept if the handler gave it and it is no failure (5xx) and no refusal that passes; a
stream is kept when it has ended, as it was, if it is within the size. After anything else the key is free again.
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
from ...state.redis_client import REDIS_ERRORS
from .response_recorder import ResponseRecorder, replay_receive, send_answer
from .store import (
    ANSWER_BYTES,
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
"""How long a call waits for an earlier one with its key."""
LOOK_S = (0.02, 0.05, 0.1, 0.25)
"""Between looks at its claim; the last one again and again."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AnswerAccepted(Protocol):
    async def __call__(self, invocation: InvocationId, *, replayed: bool) -> bool:
        """Answers with the state of an accepted invocation; False if it is not kept any more."""
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
        """A synchronous call. Errors: KeyMismatch, KeyBusy, AnswerNotKept, StoreFailed, REDIS_ERRORS."""
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
        """An async call. Errors: those of `run` and of `accept`."""
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
        """Our claim and its bytes, if the call is ours to run; no bytes if it was answered as an earlier one was."""
        ends, looks = time.monotonic() + WAIT_S, 0
        standing = b""
        while True:
            claim, raw = await self._claims.take(digest, ours, standing)
            standing = b""
            if claim.owner == ours.owner:
                return claim, raw
            if claim.fingerprint != ours.fingerprint:
                raise KeyMismatch(
                    "this Idempotency-Key was used for another call: another function, path, method or body",
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
                    f"the call with this Idempotency-Key runs since more than {WAIT_S:g} s, as {claim.invocation}",
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
            await self._gateway({**scope, "headers": headers}, replay_receive(body, asyncio.Event()), recorder)
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
        """A store or a Redis that fails costs the copy, never the answer: the key is free when its lease runs out."""
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
