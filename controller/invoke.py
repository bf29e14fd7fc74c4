"""One call, from its slot on a worker to the last byte of its answer.

Tries again on another worker what did not begin to answer: a worker that was full or draining ran nothing; one
that died under the call may have, and a third death of that kind is the call's own doing. A stream with marks goes
on at another worker from where it was (`marks`). Small answers are read whole, so that the bill stands in their
headers; everything else passes through as it comes.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import aiohttp
from yarl import URL

from fleetstart.controller.headers import response_headers
from fleetstart.controller.host_watch import HostSilent, HostWatch
from fleetstart.controller.marks import Marks
from fleetstart.controller.outcomes import bill, cost, join_start, own_headers, start_kind
from fleetstart.controller.responses import RawHeaders, Send, bill_headers, closing_event
from fleetstart.controller.routes import BUSY_NS, SUSPECT_NS, Call, Route, Worker
from fleetstart.runtime.contract.errors import FleetError, OutOfMemory, WorkerLost
from fleetstart.runtime.contract.headers import (
    ATTEMPT_HEADER,
    BUSY_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    ERROR_HEADER,
    REQUEST_HEADER,
    TOKEN_HEADER,
)
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.orders import WorkerOrder, WorkerStatus

log = logging.getLogger(__name__)

DEATHS_ALLOWED = 3
"""A call that ended three workers would end the fourth: it must not eat workers for ever."""
MOVES_ALLOWED = 8
"""A stream that lost more workers ends: each had to compute all of its tokens anew."""
AWAY_NS = 2_000_000_000
"""How long a worker whose host is silent is passed over: by then another one may be ready, or the host back."""
WHOLE_BYTES = 1 << 20
"""Answers up to this are read before they are passed on: the bill is exact, and a worker's death can be mended."""
LARGE_BODY_BYTES = 1 << 20
"""Bodies beyond are written in pieces, so that other calls get their turn meanwhile."""
CONNECT_S = 2.0
_NO_AUTO = frozenset(("User-Agent", "Accept", "Accept-Encoding", "Content-Type"))
_EVENT_STREAM = b"text/event-stream"


class Died(Exception):
    """The connection ended without an answer, or amid a stream that can go on elsewhere; the worker had the call."""


class Unreached(Exception):
    """No connection could be made: the worker never saw the call."""


class HandedBack(Exception):
    """The worker ran nothing: it is full, or draining."""


class Cut(Exception):
    """The answer had begun and cannot go on."""

    def __init__(self, error: FleetError) -> None:
        self.error = error


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600, use_dns_cache=False),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_NO_AUTO,
        max_line_size=65536,
        max_field_size=65536,
    )


class Invoker:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        demand: Callable[[], None],
        turned_away: Callable[[Route], FleetError],
        waited_out: Callable[[Route, Call], FleetError],
        book: Callable[[Route, Call], None],
        order_of: Callable[[WorkerId], WorkerOrder | None],
        final_status: Callable[[WorkerId], Awaitable[WorkerStatus | None]],
    ) -> None:
        self._session = session
        self._demand = demand
        self._turned_away = turned_away
        self._waited_out = waited_out
        self._book = book
        self._order_of = order_of
        self._final_status = final_status

    async def run(self, route: Route, call: Call, send: Send) -> None:
        """Answers the call. Errors: FleetError if nothing was sent yet, Cut if something was."""
        again = False
        while True:
            worker = await self.seat(route, call, again=again)
            try:
                await self._attempt(route, call, worker, send)
                return
            except HandedBack:
                self.hand_back(route, call, worker, BUSY_NS)
            except Unreached:
                self.hand_back(route, call, worker, SUSPECT_NS)
            except HostSilent:
                self.hand_back(route, call, worker, AWAY_NS)
            except Died:
                self.hand_back(route, call, worker, SUSPECT_NS)
                call.deaths += 1
                if call.deaths >= DEATHS_ALLOWED:
                    await self._give_up(route, call, worker)
            again = True

    async def seat(self, route: Route, call: Call, *, again: bool) -> Worker:
        """A slot, now or in turn; `again` for a call that was handed back. Errors: as of `_turn`."""
        worker = route.take(call, time.monotonic_ns(), first=again)
        if worker is None:
            worker = await self._turn(route, call, again=again)
        call.attempts += 1
        if not call.begun:
            call.queue_ns = call.dispatched_ns - call.accepted_ns
        return worker

    async def _turn(self, route: Route, call: Call, *, again: bool) -> Worker:
        """Errors: QueueFull, Overloaded, QueueTimeout."""
        turn = route.wait_again(call) if again else route.wait(call)
        if turn is None:
            raise self._turned_away(route)
        self._demand()
        if again or not call.queue_ends_ns:
            return await turn
        try:
            async with asyncio.timeout((call.queue_ends_ns - time.monotonic_ns()) / 1e9):
                return await turn
        except TimeoutError:
            raise self._waited_out(route, call) from None

    def hand_back(self, route: Route, call: Call, worker: Worker, avoid_ns: int) -> None:
        """The call leaves its slot; the worker is passed over for a while."""
        now_ns = time.monotonic_ns()
        route.avoid(worker, now_ns, avoid_ns)
        route.leave(call, now_ns, waive=True)

    async def _give_up(self, route: Route, call: Call, worker: Worker) -> NoReturn:
        status = await self._final_status(worker.id)
        cause = status.error if status is not None else None
        deaths = f"{call.deaths} workers ended under this call"
        hint = f"`fs logs {route.key.name}` has their last words"
        if cause is not None and cause.code == OutOfMemory.code:
            raise OutOfMemory(f"function {route.key.name}: {deaths}: {cause.message}", hint=cause.hint or hint)
        why = cause.message if cause is not None else "they closed the connection without an answer"
        raise WorkerLost(f"function {route.key.name}: {deaths}: {why}", hint=hint)

    # ── one attempt ────────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, route: Route, call: Call, worker: Worker, send: Send) -> None:
        watch = HostWatch(worker.status.endpoint)
        try:
            response = await watch.wait(self._request(call, worker))
            try:
                await self._pass(route, call, worker, response, watch, send)
            finally:
                response.release()
        finally:
            watch.close()

    async def _request(self, call: Call, worker: Worker) -> aiohttp.ClientResponse:
        left_ms = max(0, call.deadline_ns - time.monotonic_ns()) // 1_000_000
        carried = call.marks.carry() if call.marks is not None else b""
        headers = [
            *call.headers,
            (TOKEN_HEADER, worker.status.token),
            (REQUEST_HEADER, call.id),
            (DEADLINE_HEADER, str(left_ms)),
            (ATTEMPT_HEADER, str(call.attempts)),
            (CONTINUE_HEADER, str(len(carried))),
        ]
        content = call.body + carried
        body: bytes | io.BytesIO | None = content or None
        if len(content) > LARGE_BODY_BYTES:
            body = io.BytesIO(content)
        url = URL(f"http://{worker.status.endpoint}{call.target}", encoded=True)
        try:
            return await self._session.request(call.method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreached from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Died from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Died from error

    async def _pass(
        self,
        route: Route,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        watch: HostWatch,
        send: Send,
    ) -> None:
        headers = response.headers
        if response.status == 503 and (BUSY_HEADER in headers or DRAINING_HEADER in headers):
            await watch.wait(self._read(response))
            raise HandedBack
        if call.begun:
            self._check_continues(route, response)
            await self._pass_stream(route, call, worker, response, watch, send)
            return
        call.status = response.status
        call.error = headers.get(ERROR_HEADER, "")
        if self._is_whole(call, response):
            body = await watch.wait(self._read(response))
            await self._pass_whole(route, call, worker, response, body, send)
        else:
            await self._pass_stream(route, call, worker, response, watch, send)

    def _check_continues(self, route: Route, response: aiohttp.ClientResponse) -> None:
        """Errors: Unreached if the worker is on its way out, Cut if it does not go on with the stream."""
        if response.status == 503:
            raise Unreached
        if response.status != 200 or CONTINUE_HEADER not in response.headers:
            raise Cut(
                WorkerLost(
                    f"function {route.key.name}: its worker was lost in mid-answer, and another one answered "
                    f"HTTP {response.status} instead of going on with it"
                )
            )

    def _is_whole(self, call: Call, response: aiohttp.ClientResponse) -> bool:
        if call.method == "HEAD" or response.status in (204, 304):
            return True
        length = response.headers.get("Content-Length", "")
        return length.isdecimal() and int(length) <= WHOLE_BYTES

    async def _pass_whole(
        self, route: Route, call: Call, worker: Worker, response: aiohttp.ClientResponse, body: bytes, send: Send
    ) -> None:
        now_ns = time.monotonic_ns()
        self.close_queue(call, worker)
        call.timeline.add("execute", call.dispatched_ns, now_ns)
        call.billed_ms = route.leave(call, now_ns, waive=False)
        headers = self._head(route, call, worker, response, keep_length=True)
        headers += bill_headers(call.billed_ms, cost(route, call), call.timeline.server_timing())
        call.begun = True
        self._book(route, call)
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _pass_stream(
        self,
        route: Route,
        call: Call,
        worker: Worker,
        response: aiohttp.ClientResponse,
        watch: HostWatch,
        send: Send,
    ) -> None:
        """Each piece goes out when it has come in; a slow reader slows its worker down, and nothing piles up here."""
        head_ns = time.monotonic_ns()
        if call.begun:
            self._close_move(call, worker, head_ns)
        else:
            await self._begin_stream(route, call, worker, response, head_ns, send)
        tail = b""
        try:
            while piece := await watch.wait(response.content.readany()):
                if call.marks is not None:
                    piece = call.marks.feed(piece)
                tail = await self._pass_on(call, piece, tail, send)
        except (aiohttp.ClientError, ConnectionError, HostSilent) as error:
            await self._lose(route, call, worker, head_ns, error)
        if call.marks is not None:
            tail = await self._pass_on(call, call.marks.rest(), tail, send)
        self.close_stream(route, call, head_ns)
        last = b""
        if call.events:
            last = (b"" if tail in (b"\n\n", b"") else b"\n\n") + closing_event(bill(route, call, worker))
        self._book(route, call)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin_stream(
        self, route: Route, call: Call, worker: Worker, response: aiohttp.ClientResponse, head_ns: int, send: Send
    ) -> None:
        self.close_queue(call, worker)
        call.timeline.add("execute", call.dispatched_ns, head_ns)
        raw_type = response.headers.get("Content-Type", "").encode()
        call.events = raw_type.startswith(_EVENT_STREAM) and "Content-Encoding" not in response.headers
        if call.events and CONTINUE_HEADER in response.headers:
            call.marks = Marks()
        headers = self._head(route, call, worker, response, keep_length=not call.events)
        headers.append((b"server-timing", call.timeline.server_timing().encode()))
        call.begun = True
        await send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _pass_on(self, call: Call, piece: bytes, tail: bytes, send: Send) -> bytes:
        """The last two bytes of all that was passed on: half an end of an event, perhaps."""
        if not piece:
            return tail
        if call.events:
            call.event_count += (tail[-1:] + piece).count(b"\n\n")
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        return piece[-2:] if len(piece) > 1 else (tail + piece)[-2:]

    async def _lose(self, route: Route, call: Call, worker: Worker, head_ns: int, error: Exception) -> NoReturn:
        """Errors: Died or HostSilent if the stream can go on elsewhere, else Cut."""
        call.lost_ns = time.monotonic_ns()
        call.timeline.add("respond", head_ns, call.lost_ns)
        if call.marks is None or not call.marks.whole or call.moves >= MOVES_ALLOWED:
            raise Cut(await self._lost_error(route, worker, error)) from error
        call.moves += 1
        log.info("a stream goes on elsewhere", extra={"invocation": call.id, "worker": worker.id, "error": str(error)})
        raise error if isinstance(error, HostSilent) else Died from error

    async def _lost_error(self, route: Route, worker: Worker, error: Exception) -> FleetError:
        status = await self._final_status(worker.id)
        cause = "its host does not answer" if isinstance(error, HostSilent) else "the connection ended"
        if status is not None and status.error is not None:
            cause = status.error.message
        return WorkerLost(f"function {route.key.name}: its worker was lost in mid-answer: {cause}")

    def close_stream(self, route: Route, call: Call, head_ns: int) -> None:
        now_ns = time.monotonic_ns()
        call.timeline.add("respond", head_ns, now_ns)
        call.billed_ms = route.leave(call, now_ns, waive=False)

    def close_queue(self, call: Call, worker: Worker) -> None:
        """Its worker begins to answer: what it waited for goes on its timeline."""
        call.start = start_kind(call, worker)
        call.timeline.add("queue", call.accepted_ns, call.dispatched_ns)
        if call.start != "hot":
            join_start(call, worker.status, self._order_of(worker.id), call.accepted_ns)

    def _close_move(self, call: Call, worker: Worker, head_ns: int) -> None:
        if worker.ready_ns > call.lost_ns:
            join_start(call, worker.status, self._order_of(worker.id), call.lost_ns)
        call.timeline.add("move", call.lost_ns, head_ns)

    def _head(
        self, route: Route, call: Call, worker: Worker, response: aiohttp.ClientResponse, *, keep_length: bool
    ) -> RawHeaders:
        headers = response_headers(response.raw_headers, keep_length=keep_length)
        headers += own_headers(route, call, worker)
        return headers
