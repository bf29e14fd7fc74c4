"""WebSockets to functions that are ASGI apps: passed through as they are, for as long as they are open.

A socket is a call: it waits for a worker as others do, keeps its slot and its worker while it is open, and is billed
for that time. It ends when either side closes it, and says why otherwise: 1012 when its worker is drained (connect
again, to another one), 1011 when that was lost, 1009 for a message that is too large, 1008 when its time is up, 1001
after nobody has said anything for IDLE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError, Unavailable, WorkerLost
from fleetstart.runtime.contract.ids import InvocationId, new_invocation_id
from fleetstart.runtime.contract.worker_headers import (
    BUSY_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    REQUEST_HEADER,
    TOKEN_HEADER,
)

from ..billing.budget_watch import BudgetWatch
from ..http.asgi import Receive, Scope, Send
from ..http.headers import request_headers, sane_request_id
from ..http.invoke_url import parse_target
from ..http.request_body import header
from ..http.websocket import SWITCHED, deny
from .admission.admission import Doorkeeper
from .call_recorder import Books
from .dispatch.backend import BUSY_NS, SUSPECT_NS, Call, Worker
from .dispatch.call_summary import own_headers
from .dispatch.slots import DEATHS_ALLOWED, Seating
from .router import RouteTable
from .websocket_session import CLOSE_S, LOST, Close, Socket, sendable, settled

log = logging.getLogger(__name__)
HEARTBEAT_S = 20.0
"""Between pings to the worker: a host that went silent is noticed after one and a half of them."""
CLIENT_GONE = 499


class SocketRefused(FleetError):
    code = "socket_refused"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, hint="the function's own app decides which sockets it takes")
        self.status = status  # type: ignore[misc]  # the app's own


class Sockets:
    """One a gateway; shares its routes, books and doorkeeper."""

    def __init__(
        self,
        table: RouteTable,
        books: Books,
        doorkeeper: Doorkeeper,
        seating: Seating,
        session: aiohttp.ClientSession,
        billing: BudgetWatch,
    ) -> None:
        self._table = table
        self._books = books
        self._doorkeeper = doorkeeper
        self._seating = seating
        self._session = session
        self._billing = billing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted_ns, accepted_unix_ns = time.monotonic_ns(), time.time_ns()
        request_id = sane_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        await receive()  # websocket.connect
        try:
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            route = await self._table.find(target, request_id)
            terms = self._doorkeeper.admit(route, scope)
        except FleetError as refusal:
            await deny(send, refusal, request_id)
            return
        try:
            call = Call(
                id=InvocationId(request_id),
                method="GET",
                target=target.rest,
                headers=[pair for pair in request_headers(scope["headers"]) if not pair[0].startswith("sec-websocket")],
                body=b"",
                accepted_ns=accepted_ns,
                accepted_unix_ns=accepted_unix_ns,
                deadline_ns=accepted_ns + round(terms.timeout_s * 1e9),
                queue_ends_ns=accepted_ns + round(terms.queue_s * 1e9) if terms.queue_s is not None else 0,
                price=self._billing.price(accepted_unix_ns // 1_000_000),
                key=scope.get("fs.key", ""),
            )
            socket = Socket(route, call, scope, receive, send, terms.max_body_bytes)
            await self._serve(socket)
        except FleetError as refusal:
            await deny(send, refusal, request_id)
        finally:
            self._doorkeeper.leave(terms, 0)

    async def _serve(self, socket: Socket) -> None:
        route, call = socket.route, socket.call
        self._books.open(route, call)
        try:
            await self._connect_and_pass(socket)
        except FleetError as error:
            self._books.end_badly(route, call, error)
            await deny(socket.send, error, call.id, own_headers(route, call, call.worker)[1:])
        except asyncio.CancelledError:
            call.status, call.error = call.status or 503, Unavailable.code
            raise
        except Exception as error:
            log.exception("a socket failed in the gateway", extra={"invocation": call.id})
            self._books.end_badly(route, call, FleetError(f"{type(error).__name__} in the gateway"))
            with contextlib.suppress(Exception):
                await socket.close(Close(LOST, "internal"))
        finally:
            self._books.close(route, call)

    async def _connect_and_pass(self, socket: Socket) -> None:
        """Errors: FleetError if it was not opened."""
        route, call = socket.route, socket.call
        first = asyncio.ensure_future(socket.receive())
        connecting = asyncio.ensure_future(self._connect(socket))
        try:
            left_s = max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9)
            await asyncio.wait({first, connecting}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                if first.done():
                    call.status, call.error = CLIENT_GONE, "client_gone"
                    return
                raise DeadlineExceeded(f"function {route.key.name}: no worker took the socket in its time")
            upstream = connecting.result()
        finally:
            await settled(connecting)
            if not connecting.done() or connecting.cancelled() or connecting.exception() is not None:
                await settled(first)
        try:
            await self._pass(socket, upstream, first)
        finally:
            await settled(first)
            await upstream.close()

    async def _connect(self, socket: Socket) -> aiohttp.ClientWebSocketResponse:
        """Errors: FleetError."""
        route, call = socket.route, socket.call
        again = False
        while True:
            worker = await self._seating.seat(route, call, again=again)
            again = True
            try:
                return await self._request(socket, worker)
            except aiohttp.WSServerHandshakeError as error:
                headers: Mapping[str, str] = error.headers or {}
                if error.status != 503 or not (BUSY_HEADER in headers or DRAINING_HEADER in headers):
                    status = error.status if error.status >= 400 else 502
                    text = f"function {route.key.name} refused the WebSocket with HTTP {error.status}"
                    raise SocketRefused(text, status) from error
                self._seating.hand_back(route, call, worker, BUSY_NS)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._seating.hand_back(route, call, worker, SUSPECT_NS)
            except (aiohttp.ClientError, ConnectionError) as error:
                self._seating.hand_back(route, call, worker, SUSPECT_NS)
                call.deaths += 1
                if call.deaths >= DEATHS_ALLOWED:
                    name = route.key.name
                    raise WorkerLost(
                        f"function {name}: {call.deaths} workers ended under this socket",
                        hint=f"`fs logs {name}` has their last words",
                    ) from error

    async def _request(self, socket: Socket, worker: Worker) -> aiohttp.ClientWebSocketResponse:
        call = socket.call
        left_ms = max(0, call.deadline_ns - time.monotonic_ns()) // 1_000_000
        headers = [
            *call.headers,
            (TOKEN_HEADER, worker.status.token),
            (REQUEST_HEADER, call.id),
            (DEADLINE_HEADER, str(left_ms)),
        ]
        return await self._session.ws_connect(
            URL(f"http://{worker.status.endpoint}{call.target}", encoded=True),
            headers=headers,
            protocols=socket.scope.get("subprotocols") or (),
            max_msg_size=socket.max_message_bytes,
            heartbeat=HEARTBEAT_S,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            autoclose=False,
        )

    async def _pass(
        self, socket: Socket, upstream: aiohttp.ClientWebSocketResponse, first: asyncio.Future[Any]
    ) -> None:
        route, call = socket.route, socket.call
        assert call.worker is not None
        self._seating.close_queue(call, call.worker)
        opened_ns = time.monotonic_ns()
        call.timeline.add("execute", call.dispatched_ns, opened_ns)
        call.begun, call.status = True, SWITCHED
        headers = own_headers(route, call, call.worker)
        await socket.send({"type": "websocket.accept", "subprotocol": upstream.protocol, "headers": headers})
        close = await socket.passed(upstream, first)
        call.timeline.add("respond", opened_ns, time.monotonic_ns())
        call.error = close.error
        self._books.leave(route, call, waive=close.error == WorkerLost.code)
        self._books.book(route, call)
        if not close.by_client:
            await socket.close(close)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await upstream.close(code=sendable(close.code), message=close.reason.encode())
