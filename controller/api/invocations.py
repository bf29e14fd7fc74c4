"""Handlers of stored (async) invocations, webhook secrets and schedules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.ids import InvocationId, new_invocation_id

from ..async_invocations import request_options
from ..async_invocations.cron_schedules import CronScheduler, next_unix_s, schedule_id
from ..async_invocations.event_stream import EventStream
from ..async_invocations.middleware import answer_ended
from ..async_invocations.presenter import InvocationPresenter
from ..async_invocations.store import lifecycle
from ..async_invocations.store.event_log import EventId
from ..async_invocations.store.invocations import InvocationStore, StoredInvocation, not_kept
from ..async_invocations.store.payloads import PayloadStore
from ..async_invocations.store.redis_clock import RedisClock
from ..async_invocations.submit import AsyncSubmitter
from ..async_invocations.webhooks.secrets import SigningSecrets, WebhookSecrets
from ..auth.authorize import project_not_found
from ..auth.request_context import caller_of, query_function, set_audit_object
from ..http.asgi import Message
from ..http.json_api import PlacedResponse, json_body, json_response, now_unix_ms
from ..schemas.invocations import InvocationInfo, ReplayTerms, ScheduleInfo, WebhookRotation, WebhookSecret
from ..state.access_records import DEFAULT
from ..state.invocation_records import ENDED, Progress
from ..state.view import View

LIMIT = 50
LIMIT_MAX = 1_000
GRACE_MAX_S = 30 * 86_400


class InvocationsApi:
    def __init__(
        self,
        invocations: InvocationStore,
        payloads: PayloadStore,
        presenter: InvocationPresenter,
        submitter: AsyncSubmitter,
        webhook_secrets: WebhookSecrets,
        schedules: CronScheduler,
        event_stream: EventStream,
        view: View,
        clock: RedisClock,
        stopping: asyncio.Event,
    ) -> None:
        """`clock`: that by which runners read when an invocation is due. This machine's own may be hours away from
        it."""
        self._invocations = invocations
        self._payloads = payloads
        self._presenter = presenter
        self._submitter = submitter
        self._webhook_secrets = webhook_secrets
        self._schedules = schedules
        self._event_stream = event_stream
        self._view = view
        self._clock = clock
        self._stopping = stopping

    # ── looking ────────────────────────────────────────────────────────────────────────────────────

    async def kept(self, request: Request) -> Response:
        query = request.query_params
        function, status = query_function(request) or "", query.get("status", "")
        if status and status not in (*ENDED, "queued", "running"):
            raise InvalidInput(
                f"status {status[:40]!r} is none", hint="queued, running, succeeded, failed, cancelled and expired are"
            )
        dead = query.get("dead", "0") not in ("", "0", "false")
        limit = _limit(query.get("limit", ""))
        caller = caller_of(request)
        found: list[InvocationInfo] = []
        functions = [function] if function else caller.key.functions if caller.key is not None else []
        async for entry in self._invocations.find(
            min(limit, 100), functions=functions, project=caller.project, status=status, dead=dead
        ):
            if caller.sees(entry.envelope.function):
                found.append(self._presenter.briefly(entry))
            if len(found) >= limit:
                break
        return json_response(found)

    async def one(self, request: Request) -> InvocationInfo | None:
        """Reads a stored invocation, waiting for its end if `Prefer: wait` asks for it; None if it is not stored, or if
        the caller may not see its function."""
        invocation = _id(request)
        _, wait_s = request_options.read_prefer(request.headers.get("prefer", ""))
        entry = await self._invocations.get(invocation)
        if entry is None or not caller_of(request).sees(entry.envelope.function):
            return None
        if wait_s and not entry.progress.ended:
            entry = await self._invocations.wait_ended(invocation, wait_s, self._stopping) or entry
        return await self._presenter.fully(entry)

    async def _own(self, request: Request) -> StoredInvocation:
        """Reads a stored invocation. Errors: NotFound, also if the caller may not see its function."""
        entry = await self._invocations.require(_id(request))
        if not caller_of(request).sees(entry.envelope.function):
            raise not_kept(entry.envelope.id)
        return entry

    async def result(self, request: Request) -> Response:
        entry = await self._own(request)
        if not entry.progress.ended:
            headers = {"location": f"/api/v1/invocations/{entry.envelope.id}", "retry-after": "1"}
            return json_response(self._presenter.briefly(entry), status=202, headers=headers)
        return await _collected(self._payloads, entry)

    async def events(self, request: Request) -> Response:
        entry = await self._own(request)
        last = request.headers.get("last-event-id") or request.query_params.get("last_event_id", "")
        begin = await self._event_stream.begin(entry, last)
        if begin is None:
            return Response(status_code=204)  # all of it was read; this ends an EventSource
        headers = {"cache-control": "no-cache", "x-request-id": entry.envelope.id}
        place = self._event_stream.place(caller_of(request).name)
        return PlacedResponse(self._events(entry, begin), place, media_type="text/event-stream", headers=headers)

    async def _events(self, entry: StoredInvocation, begin: EventId) -> AsyncIterator[bytes]:
        async for block in self._event_stream.follow(entry.envelope.id, begin):
            yield block

    # ── changing ───────────────────────────────────────────────────────────────────────────────────

    async def cancel(self, request: Request) -> Response:
        """Cancels an invocation. Answers at once; a running one ends a moment later, when its worker has stopped it."""

        def change(entry: StoredInvocation) -> Progress:
            return lifecycle.cancelling(entry.progress, entry.envelope, self._clock.now_unix_ms())

        await self._own(request)
        await self._clock.refresh()
        entry = await self._invocations.change(_id(request), change, publish="cancelling")
        return json_response(self._presenter.briefly(entry), status=200 if entry.progress.ended else 202)

    async def redrive(self, request: Request) -> Response:
        def change(entry: StoredInvocation) -> Progress:
            progress, envelope = entry.progress, entry.envelope
            if not progress.ended or progress.status == "succeeded" or envelope.origin == "sync":
                raise InvalidInput(
                    f"invocation {envelope.id} is {progress.status}"
                    + (", and was a synchronous call" if envelope.origin == "sync" else ""),
                    hint="only async ones that failed, expired or were cancelled are redriven; `fs replay` repeats any",
                )
            return lifecycle.redriven(progress, envelope, self._clock.now_unix_ms())

        await self._own(request)
        await self._clock.refresh()
        return json_response(self._presenter.briefly(await self._invocations.change(_id(request), change)))

    async def redeliver(self, request: Request) -> Response:
        def change(entry: StoredInvocation) -> Progress:
            if not entry.envelope.webhook or not entry.progress.ended:
                what = "has no webhook" if not entry.envelope.webhook else f"is {entry.progress.status}"
                raise InvalidInput(
                    f"invocation {entry.envelope.id} {what}", hint="only webhooks of ended invocations are delivered"
                )
            return lifecycle.redelivered(entry.progress, self._clock.now_unix_ms())

        await self._own(request)
        await self._clock.refresh()
        return json_response(self._presenter.briefly(await self._invocations.change(_id(request), change)))

    async def replay(self, request: Request) -> Response:
        terms = await json_body(request, ReplayTerms, empty=b"{}")
        entry = await self._own(request)
        kept = await self._payloads.request(entry.envelope.id)
        if kept is None:
            raise NotFound(f"the request of invocation {entry.envelope.id} is not stored any more")
        past, body = kept
        target = _retargeted(past.target, past.function, terms.version)
        envelope = msgspec.structs.replace(
            past,
            id=new_invocation_id(),
            target=target,
            fingerprint=request_options.fingerprint(past.project, past.method, target, [], body),
            accepted_unix_ms=now_unix_ms(),
            origin="replay",
            source=past.id,
            webhook="",
        )
        accepted = await self._submitter.accept(envelope, body)
        info = self._presenter.briefly(await self._invocations.require(accepted.id))
        return json_response(info, status=202, headers={"location": info.url})

    # ── webhooks and schedules ─────────────────────────────────────────────────────────────────────

    async def secret(self, request: Request) -> Response:
        project = self._project(request)
        return json_response(_secret_info(project, await self._webhook_secrets.get(project)))

    async def rotate(self, request: Request) -> Response:
        project = self._project(request)
        terms = await json_body(request, WebhookRotation, empty=b"{}")
        if not 0 <= terms.grace_s <= GRACE_MAX_S:
            raise InvalidInput(f"a grace period has 0 s to {GRACE_MAX_S // 86_400} days, got {terms.grace_s:g} s")
        set_audit_object(request, project)
        return json_response(_secret_info(project, await self._webhook_secrets.rotate(project, terms.grace_s)))

    def _project(self, request: Request) -> str:
        """Errors: NotFound."""
        project = request.query_params.get("project") or DEFAULT
        if not self._view.access.has_project(project):
            raise project_not_found(project, self._view.access.projects)
        return project

    async def schedules(self, request: Request) -> Response:
        marks = await self._schedules.marks()
        now_unix_s = int(time.time())
        shown = []
        sees = caller_of(request).sees
        for spec in sorted(self._schedules.scheduled(), key=lambda spec: spec.name):
            if not sees(spec.name):
                continue
            mark = marks.get(spec.name)
            last_unix_s = mark.last_unix_s if mark is not None else 0
            last = schedule_id(spec.name, last_unix_s) if last_unix_s else None
            entry = await self._invocations.get(last) if last is not None else None
            shown.append(
                ScheduleInfo(
                    function=spec.name,
                    version=self._view.functions[spec.name].live,
                    schedule=spec.schedule,
                    timezone=spec.timezone or "UTC",
                    next_unix_ms=next_unix_s(spec.schedule, spec.timezone, now_unix_s) * 1000,
                    last_unix_ms=last_unix_s * 1000,
                    last=last,
                    status=entry.progress.status if entry is not None else None,
                )
            )
        return json_response(shown)


def _secret_info(project: str, secrets: SigningSecrets) -> WebhookSecret:
    until_unix_ms = max((until_unix_ms for _, until_unix_ms in secrets.old), default=0)
    old_until_unix_ms = until_unix_ms if until_unix_ms > now_unix_ms() else 0
    return WebhookSecret(project=project, secret=secrets.current, old_until_unix_ms=old_until_unix_ms)


def _retargeted(target: str, function: str, version: int | str | None) -> str:
    """The same path of the same function at another version; without one, at the live one."""
    rest = target.removeprefix("/fn/")
    end = min((at for mark in "/?" if (at := rest.find(mark)) >= 0), default=len(rest))
    named = f"@{quote(str(version)[:80], safe='')}" if version is not None else ""
    return f"/fn/{function}{named}{rest[end:]}"


async def _collected(payloads: PayloadStore, entry: StoredInvocation) -> Response:
    """The stored response, sent by the code that answers a call."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await answer_ended(send, payloads, entry, [(b"x-request-id", entry.envelope.id.encode())])
    response = Response(messages[1]["body"], status_code=messages[0]["status"])
    response.raw_headers = list(messages[0]["headers"])
    return response


def _limit(text: str) -> int:
    if text and (not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= LIMIT_MAX or len(text) > 9):
        raise InvalidInput(f"limit={text[:40]!r} must be a whole number from 1 to {LIMIT_MAX}")
    return int(text or LIMIT)


def _id(request: Request) -> InvocationId:
    return InvocationId(request.path_params["id"])
