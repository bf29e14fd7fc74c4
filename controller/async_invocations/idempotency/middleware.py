"""Idempotent calls: the first call with a key runs, all later ones get its response.

While the first one runs, the others wait for it, up to `WAIT_S`. A call with a key continues if its client disconnects.
It goes on at its worker when its gateway dies: the next call with the key gets its answer from there, of a stream the
events after the `Last-Event-ID` that its client has (`numbered_events`). Stored are responses of the handler that are
neither a failure (5xx) nor a retryable rejection, up to `ANSWER_BYTES`; streams are stored when complete. After
anything else the key is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import InvocationId, Version, WorkerId
from fleetstart.runtime.contract.process.tasks import end_tasks

from ...http.asgi import Message, RawHeaders, Receive, Scope, Send
from ...http.keyed_call import KEYED_CALL, KeyedCall, NotAttached
from ...http.scope import REPEAT_KEY
from ...state.invocation_records import Answer
from ...state.redis_client import REDIS_ERRORS
from ..store.event_log import EventsGone
from .numbered_events import AfterEvent, NumberedEvents, events_after, is_event_stream
from .response_recorder import ANSWER_BYTES, ResponseRecorder, replay_receive, send_answer
from .settlement import ClaimSettlement
from .silence import KEPT_SILENT_MS, KEPT_WATCHED_S, RENEW_S, SILENT_MS, SilenceWatch
from .store import (
    KEPT_S,
    NOT_KNOWN,
    PLACE_KEPT_S,
    AnswerNotKept,
    CallPlace,
    CallPlaces,
    IdempotencyKeys,
    KeyBusy,
    KeyClaim,
    KeyLost,
    KeyMismatch,
    digest_of,
    new_claim,
    of_removed_function,
    taken_over,
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
    def __init__(self, gateway_id: str, gateway: App, claims: IdempotencyKeys, places: CallPlaces) -> None:
        self._gateway_id = gateway_id
        self._gateway = gateway
        self._claims = claims
        self._settlement = ClaimSettlement(claims, places)
        self._places = places

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
        first: Version = NOT_KNOWN,
        last: int = 0,
        answer: AnswerAccepted,
    ) -> None:
        """Serves a synchronous call, of a stream the events after the number `last`. `first`: as in `KeyClaim`.

        Errors: KeyMismatch, KeyBusy, AnswerNotKept, EventsGone, StoreFailed, REDIS_ERRORS.
        """
        digest = digest_of(project, key)
        claim, raw = await self._claim(digest, send, new_claim(fingerprint, request_id, first=first), answer, last)
        if not raw:
            return
        try:
            place = await self._place(digest, claim, last)
            name = await self._name(place, request_id)
        except BaseException:
            await self._free(digest, raw)
            raise
        if name != claim.invocation:
            claim = msgspec.structs.replace(claim, invocation=name)
            raw = await self._rename(digest, raw, claim)
            if name != request_id and await self._is_given_up(digest, name, raw):
                claim = msgspec.structs.replace(claim, invocation=request_id)
                raw = await self._rename(digest, raw, claim)
        try:
            await self._first(scope, body, send, digest, claim, raw, place, last)
        except NotAttached as failed:
            claim = msgspec.structs.replace(claim, invocation=request_id)
            if failed.error is None:  # its gateway may live, and still send it: it gives up when it reads this id
                raw = await self._rename(digest, raw, claim)
            await self._first(scope, body, send, digest, claim, raw, None, last, failed.error)

    async def accept(
        self,
        project: str,
        key: str,
        fingerprint: str,
        request_id: InvocationId,
        *,
        first: Version = NOT_KNOWN,
        accept: Callable[[InvocationId], Awaitable[InvocationId]],
        answer: AnswerAccepted,
        send: Send,
    ) -> None:
        """Serves an async call. Errors: those of `run` and of `accept`."""
        digest = digest_of(project, key)
        wanted = new_claim(fingerprint, request_id, first=first, accepts=True)
        claim, raw = await self._claim(digest, send, wanted, answer)
        if not raw:
            return
        keeper = asyncio.get_running_loop().create_task(self._hold(digest, raw))
        try:
            accepted = await accept(claim.invocation)
        except BaseException:
            await end_tasks([keeper])  # before the key is free: a renewal under way would make the claim again
            await self._free(digest, raw)
            raise
        await end_tasks([keeper])
        settled = msgspec.structs.replace(claim, state="async", invocation=accepted)
        await self._claims.settle(digest, raw, settled, b"")
        await answer(accepted, replayed=False)

    async def _hold(self, digest: str, raw: bytes) -> None:
        """Renews the claim of a call that is being stored."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(*REDIS_ERRORS):
                await self._claims.renew(digest, raw)

    async def _rename(self, digest: str, raw: bytes, claim: KeyClaim) -> bytes:
        """Errors: KeyLost, REDIS_ERRORS."""
        try:
            return await self._claims.rename(digest, raw, claim)
        except BaseException:
            await self._free(digest, raw)
            raise

    async def _free(self, digest: str, raw: bytes) -> None:
        with contextlib.suppress(*REDIS_ERRORS):
            await self._claims.free(digest, raw)

    async def _place(self, digest: str, claim: KeyClaim, last: int) -> CallPlace | None:
        """The place of a call that another gateway had begun. Errors: KeyMismatch, EventsGone."""
        place = await self._places.read(digest)
        if place is not None and place.fingerprint != claim.fingerprint:
            raise _mismatch()
        if place is not None and place.version < claim.first:  # of a function that had the name before
            place = None
        if last and (place is None or last < place.base):
            raise EventsGone(
                f"the stream after event {last} is not kept any more",
                hint="call without Last-Event-ID to run it again from its beginning",
            )
        return place

    async def _name(self, place: CallPlace | None, request_id: InvocationId) -> InvocationId:
        """The id of a call: that of the one that it goes on with, which gives up if it reads another one in the claim,
        as after a step of Redis' clock; its own if that one has a row already, as a call of a lost gateway."""
        if place is None or place.given_up or await self._places.given_up(place.invocation):
            return request_id
        return place.invocation

    async def _is_given_up(self, digest: str, invocation: InvocationId, raw: bytes) -> bool:
        """Looks once more after the claim has the id of the call that is gone on with. That one says that it gives up,
        and then looks at the claim, so that one of the two sees the other."""
        try:
            place = await self._places.read(digest)
        except BaseException:
            await self._free(digest, raw)
            raise
        return place is not None and place.invocation == invocation and place.given_up

    async def _claim(
        self, digest: str, send: Send, ours: KeyClaim, answer: AnswerAccepted, last: int = 0
    ) -> tuple[KeyClaim, bytes]:
        """Claims the key; returns the claim and its bytes. No bytes: the call was answered like an earlier one."""
        ends, looks = time.monotonic() + WAIT_S, 0
        wanted, standing, left_ms = ours, b"", None
        watch = SilenceWatch()
        while True:
            claim, raw, left, refused = await self._claims.take(digest, wanted, standing, left_ms, try_write=looks > 0)
            wanted, standing, left_ms = ours, b"", None  # if it was not taken over, nothing is left of the attempt
            if claim.owner == ours.owner:
                return claim, raw
            if claim.fingerprint != ours.fingerprint:
                raise _mismatch()
            if of_removed_function(claim, ours) and claim.state != "running":
                standing = raw
                continue
            if claim.state == "done":
                kept = await self._claims.answer(digest, claim)
                if kept is not None:
                    await send_answer(send, kept[0], _after(*kept, last), _replayed(claim))
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
            watch.look(left, time.monotonic(), refused=refused)
            place = await self._places.read(digest) if watch.silent(KEPT_SILENT_MS, KEPT_WATCHED_S) else None
            if place is not None or watch.silent():
                log.warning("an idempotency key is taken from a silent gateway", extra={"invocation": claim.invocation})
                wanted, standing, left_ms = taken_over(ours, claim, place), raw, left
                continue
            if time.monotonic() > ends:
                raise KeyBusy(
                    f"the call with this Idempotency-Key has run for more than {WAIT_S:g} s, as {claim.invocation}",
                    hint="try again after Retry-After seconds",
                    retry_after_s=5,
                )
            await asyncio.sleep(LOOK_S[min(looks, len(LOOK_S) - 1)])
            looks += 1

    async def _first(
        self,
        scope: Scope,
        body: bytes,
        send: Send,
        digest: str,
        claim: KeyClaim,
        raw: bytes,
        place: CallPlace | None,
        last: int,
        lost: FleetError | None = None,
    ) -> None:
        """Runs the call, or goes on with it at the worker that runs it, or answers that it is lost.

        Errors: NotAttached, KeyLost.
        """
        recorder: ResponseRecorder

        async def on_end() -> None:
            await end_tasks([keeper])  # before the key is free: a renewal under way would make the claim again
            await self._settlement.settle(recorder, digest, claim, raw)

        runs_again = claim.retaken and place is None and lost is None
        client = AfterEvent(_telling(send) if runs_again else send, last)
        recorder = ResponseRecorder(client, ANSWER_BYTES, on_end)
        events = NumberedEvents(recorder, count=place.base if place is not None else 0)
        recorder.too_large = bool(events.count)  # its beginning is missing
        keyed = KeyedCall(
            sent_to=partial(self._note_place, digest, claim, events),
            worker=place.worker if place is not None else None,
            invocation=place.invocation if place is not None else None,
            version=place.version if place is not None else None,
            gateway=place.gateway if place is not None else "",
            lost=lost,
            resumed=last > 0,
            partial=bool(events.count),
        )
        gone = asyncio.Event()
        keeper = asyncio.get_running_loop().create_task(self._renew(digest, claim, raw, gone))
        goes_on = False
        try:
            keyed_scope = {**scope, "headers": _headers_of(scope, claim, body), REPEAT_KEY: digest, KEYED_CALL: keyed}
            await self._gateway(keyed_scope, replay_receive(body, gone), events)
        except NotAttached:
            goes_on = True
            raise
        finally:
            await end_tasks([keeper])
            if not recorder.whole and not gone.is_set() and not goes_on:
                await self._free(digest, raw)
        if gone.is_set() and not recorder.status:
            raise _key_lost(claim)

    async def _note_place(
        self, digest: str, claim: KeyClaim, events: NumberedEvents, worker: WorkerId, version: Version, left_s: float
    ) -> None:
        """Writes where the call runs, for the gateway that goes on with it if this one is lost."""
        here = CallPlace(
            fingerprint=claim.fingerprint,
            invocation=claim.invocation,
            version=version,
            worker=worker,
            gateway=self._gateway_id,
            base=events.count,
        )
        try:
            await self._places.write(digest, here, kept_s=left_s + PLACE_KEPT_S)
        except REDIS_ERRORS as error:
            log.warning("a call cannot be taken over", extra={"invocation": claim.invocation, "error": str(error)})

    async def _renew(self, digest: str, claim: KeyClaim, raw: bytes, gone: asyncio.Event) -> None:
        """Renews the claim; sets `gone`, which cancels the call, when another call has taken it. One that goes on with
        this call at its worker disturbs nothing: both read the same answer, and their rows are one."""
        while True:
            with contextlib.suppress(*REDIS_ERRORS):
                other = await self._claims.renew(digest, raw)
                if other is not None and other.invocation == claim.invocation:
                    return
                if other is not None and await self._gives_up(digest, claim, raw):
                    log.warning(
                        "a call is cancelled: another call has taken its idempotency key",
                        extra={"key": digest[:12], "other": other.invocation},
                    )
                    gone.set()
                    return
            await asyncio.sleep(RENEW_S)

    async def _gives_up(self, digest: str, claim: KeyClaim, raw: bytes) -> bool:
        """Says that the call is given up, as another one has its key; false if that one goes on with it meanwhile, or
        is gone (`_is_given_up`). Errors: REDIS_ERRORS."""
        await self._places.mark(digest, claim.invocation, given_up=True)
        other = await self._claims.renew(digest, raw)
        if other is not None and other.invocation != claim.invocation:
            return True
        await self._places.mark(digest, claim.invocation, given_up=False)
        return False


def _mismatch() -> KeyMismatch:
    return KeyMismatch(
        "this Idempotency-Key was used for a different call: function, path, method or body differ",
        hint=f"use a key of its own for each call; keys are kept for {KEPT_S // 3600} h",
    )


def _key_lost(claim: KeyClaim) -> KeyLost:
    return KeyLost(
        f"this gateway stood still for more than {SILENT_MS // 1000} s, and another call with this "
        f"Idempotency-Key runs instead; {claim.invocation} was cancelled, and may have had effects",
        hint="send it again with the same key: it gets the other call's answer",
    )


def _headers_of(scope: Scope, claim: KeyClaim, body: bytes) -> RawHeaders:
    """The headers of the request, under the id of the call that has the key, and of the body that was read."""
    others = [(name, value) for name, value in scope["headers"] if name not in (b"x-request-id", b"content-length")]
    return [*others, (b"x-request-id", claim.invocation.encode()), (b"content-length", b"%d" % len(body))]


def _after(answer: Answer, body: bytes, last: int) -> bytes:
    """The body of a stored answer; of a stream, the events after the number `last`."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    return events_after(body, last) if last and is_event_stream(headers) else body


def _replayed(claim: KeyClaim) -> RawHeaders:
    return [(b"idempotent-replayed", b"true"), (b"x-request-id", claim.invocation.encode())]


def _telling(send: Send) -> Send:
    """A `send` that tells that the call may have run before, at a gateway that was lost."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"idempotent-retaken", b"true")]}
        await send(message)

    return telling
