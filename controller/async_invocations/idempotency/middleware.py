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

from ...http.asgi import Message, RawHeaders, Receive, Scope, Send
from ...http.scope import REPEAT_KEY
from ...state.redis_client import REDIS_ERRORS
from .response_recorder import ANSWER_BYTES, ResponseRecorder, replay_receive, send_answer
from .silence import RENEW_S, SILENT_MS, SilenceWatch
from .store import (
    KEPT_S,
    AnswerNotKept,
    IdempotencyKeys,
    KeyBusy,
    KeyClaim,
    KeyLost,
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

SETTLE_S = 60.0
"""How long a response that was sent is tried to be stored: longer than Redis takes to come back."""
SETTLE_EVERY_S = 0.5

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AnswerAccepted(Protocol):
    async def __call__(self, invocation: InvocationId, *, replayed: bool) -> bool:
        """Answers with the state of an accepted invocation; False if it is not stored any more."""
        ...


class IdempotentCall:
    def __init__(self, gateway: App, claims: IdempotencyKeys) -> None:
        self._gateway = gateway
        self._claims = claims
        self._unsettled: set[asyncio.Task[None]] = set()
        """Responses that were sent and are not stored yet."""

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
        standing, left_ms = b"", None
        watch = SilenceWatch()
        while True:
            claim, raw, left = await self._claims.take(digest, ours, standing, left_ms)
            standing, left_ms = b"", None
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
            if watch.silent(left, time.monotonic()):
                log.warning("an idempotency key is taken from a silent gateway", extra={"invocation": claim.invocation})
                ours = msgspec.structs.replace(ours, retaken=True)
                standing, left_ms = raw, left
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

        recorder = ResponseRecorder(_telling(send) if claim.retaken else send, ANSWER_BYTES, on_end)
        gone = asyncio.Event()
        keeper = asyncio.get_running_loop().create_task(self._renew(digest, raw, gone))
        headers = [
            (name, value) for name, value in scope["headers"] if name not in (b"x-request-id", b"content-length")
        ]
        headers += [(b"x-request-id", claim.invocation.encode()), (b"content-length", b"%d" % len(body))]
        try:
            await self._gateway({**scope, "headers": headers, REPEAT_KEY: digest}, replay_receive(body, gone), recorder)
        finally:
            keeper.cancel()
            if not recorder.whole and not gone.is_set():
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._claims.free(digest, raw)
        if gone.is_set() and not recorder.status:
            raise KeyLost(
                f"this gateway stood still for more than {SILENT_MS // 1000} s, and another call with this "
                f"Idempotency-Key runs instead; {claim.invocation} was cancelled, and may have had effects",
                hint="send it again with the same key: it gets the other call's answer",
            )

    async def _renew(self, digest: str, raw: bytes, gone: asyncio.Event) -> None:
        """Renews the claim; sets `gone`, which cancels the call, when another call has taken it."""
        while True:
            with contextlib.suppress(*REDIS_ERRORS):
                other = await self._claims.renew(digest, raw)
                if other is not None:
                    log.warning(
                        "a call is cancelled: another call has taken its idempotency key",
                        extra={"key": digest[:12], "other": other.invocation},
                    )
                    gone.set()
                    return
            await asyncio.sleep(RENEW_S)

    async def _settle(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Stores the response. If store or Redis fail, it is stored after it was sent, and the key is held until
        then: a later call would run again, and get another answer."""
        try:
            await self._store(recorder, digest, claim, raw)
        except (*REDIS_ERRORS, FleetError) as error:
            log.warning("an answer is kept later", extra={"invocation": claim.invocation, "error": str(error)})
            task = asyncio.get_running_loop().create_task(self._settle_later(recorder, digest, claim, raw))
            self._unsettled.add(task)
            task.add_done_callback(self._unsettled.discard)

    async def _store(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Errors: REDIS_ERRORS, StoreFailed."""
        if not worth_keeping(recorder.status, ran=recorder.ran):
            await self._claims.free(digest, raw)
        elif recorder.too_large:
            await self._claims.settle(digest, raw, msgspec.structs.replace(claim, state="unkept"), b"")
        else:
            done = msgspec.structs.replace(claim, state="done", answer=recorder.answer())
            await self._claims.settle(digest, raw, done, bytes(recorder.body))

    async def _settle_later(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Tries again until the response is stored, another call has the key, or `SETTLE_S` are over."""
        ends_s = time.monotonic() + SETTLE_S
        while time.monotonic() < ends_s:
            await asyncio.sleep(SETTLE_EVERY_S)
            try:
                if await self._claims.renew(digest, raw) is not None:
                    return  # stored by an attempt that seemed to fail, or taken by another call
                await self._store(recorder, digest, claim, raw)
                return
            except (*REDIS_ERRORS, FleetError):
                continue
        log.warning("an answer could not be kept", extra={"invocation": claim.invocation})


def _replayed(claim: KeyClaim) -> RawHeaders:
    return [(b"idempotent-replayed", b"true"), (b"x-request-id", claim.invocation.encode())]


def _telling(send: Send) -> Send:
    """A `send` that tells that the call may have run before, at a gateway that was lost."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"idempotent-retaken", b"true")]}
        await send(message)

    return telling
