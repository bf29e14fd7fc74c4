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
from ..http.headers import request_headers, valid_request_id
from ..http.invoke_url import parse_target
from ..http.request_body import header
from ..http.websocket import SWITCHING_PROTOCOLS, reject_handshake
from .admission.admission import AdmissionControl
from .call_recorder import CallRecorder
from .dispatch.backend import BUSY_BACKOFF_NS, SUSPECT_BACKOFF_NS, Call, Worker
from .dispatch.call_summary import platform_headers
from .dispatch.slots import DEATHS_ALLOWED, SlotAcquirer
from .router import Router
from .websocket_session import CLOSE_S, LOST, SocketClose, WebSocketSession, cancel_and_wait, sendable

log = logging.getLogger(__name__)
HEARTBEAT_S = 20.0
"""Between pings to the worker: a host that went silent is noticed after one and a half of them."""
CLIENT_CLOSED_REQUEST = 499


class WebSocketRejected(FleetError):
    code = "socket_refused"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, hint="the function's own app decides which sockets it takes")
        self.status = status  # type: ignore[misc]  # the app's own


class WebSocketProxy:
    """One a gateway; shares its routes, recorder and admission."""

    def __init__(
        self,
        router: Router,
        recorder: CallRecorder,
        admission: AdmissionControl,
        slots: SlotAcquirer,
        session: aiohttp.ClientSession,
        billing: BudgetWatch,
    ) -> None:
        self._router = router
        self._recorder = recorder
        self._admission = admission
        self._slots = slots
        self._session = session
        self._billing = billing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted_ns, accepted_unix_ns = time.monotonic_ns(), time.time_ns()
        request_id = valid_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        await receive()  # websocket.connect
        try:
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            backend = await self._router.find(target, request_id)
            limits = self._admission.admit(backend, scope)
        except FleetError as refusal:
            await reject_handshake(send, refusal, request_id)
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
                deadline_ns=accepted_ns + round(limits.timeout_s * 1e9),
                queue_ends_ns=accepted_ns + round(limits.queue_s * 1e9) if limits.queue_s is not None else 0,
                price=self._billing.price(accepted_unix_ns // 1_000_000),
                key=scope.get("fs.key", ""),
            )
            socket = WebSocketSession(backend, call, scope, receive, send, limits.max_body_bytes)
            await self._serve(socket)
        except FleetError as refusal:
            await reject_handshake(send, refusal, request_id)
        finally:
            self._admission.leave(limits, 0)

    async def _serve(self, socket: WebSocketSession) -> None:
        backend, call = socket.backend, socket.call
        self._recorder.open(backend, call)
        try:
            await self._connect_and_pass(socket)
        except FleetError as error:
            self._recorder.record_failure(backend, call, error)
            await reject_handshake(socket.send, error, call.id, platform_headers(backend, call, call.worker)[1:])
        except asyncio.CancelledError:
            call.status, call.error = call.status or 503, Unavailable.code
            raise
        except Exception as error:
            log.exception("a socket failed in the gateway", extra={"invocation": call.id})
            self._recorder.record_failure(backend, call, FleetError(f"{type(error).__name__} in the gateway"))
            with contextlib.suppress(Exception):
                await socket.close(SocketClose(LOST, "internal"))
        finally:
            self._recorder.close(backend, call)

    async def _connect_and_pass(self, socket: WebSocketSession) -> None:
        """Errors: FleetError if it was not opened."""
        backend, call = socket.backend, socket.call
        first = asyncio.ensure_future(socket.receive())
        connecting = asyncio.ensure_future(self._connect(socket))
        try:
            left_s = max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9)
            await asyncio.wait({first, connecting}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                if first.done():
                    call.status, call.error = CLIENT_CLOSED_REQUEST, "client_gone"
                    return
                raise DeadlineExceeded(f"function {backend.key.name}: no worker took the socket in its time")
            upstream = connecting.result()
        finally:
            await cancel_and_wait(connecting)
            if not connecting.done() or connecting.cancelled() or connecting.exception() is not None:
                await cancel_and_wait(first)
        try:
            await self._pass(socket, upstream, first)
        finally:
            await cancel_and_wait(first)
            await upstream.close()

    async def _connect(self, socket: WebSocketSession) -> aiohttp.ClientWebSocketResponse:
        """Errors: FleetError."""
        backend, call = socket.backend, socket.call
        again = False
        while True:
            worker = await self._slots.acquire(backend, call, again=again)
            again = True
            try:
                return await self._request(socket, worker)
            except aiohttp.WSServerHandshakeError as error:
                headers: Mapping[str, str] = error.headers or {}
                if error.status != 503 or not (BUSY_HEADER in headers or DRAINING_HEADER in headers):
                    status = error.status if error.status >= 400 else 502
                    text = f"function {backend.key.name} refused the WebSocket with HTTP {error.status}"
                    raise WebSocketRejected(text, status) from error
                self._slots.release_for_retry(backend, call, worker, BUSY_BACKOFF_NS)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._slots.release_for_retry(backend, call, worker, SUSPECT_BACKOFF_NS)
            except (aiohttp.ClientError, ConnectionError) as error:
                self._slots.release_for_retry(backend, call, worker, SUSPECT_BACKOFF_NS)
                call.deaths += 1
                if call.deaths >= DEATHS_ALLOWED:
                    name = backend.key.name
                    raise WorkerLost(
                        f"function {name}: {call.deaths} workers ended under this socket",
                        hint=f"`fs logs {name}` has their last words",
                    ) from error

    async def _request(self, socket: WebSocketSession, worker: Worker) -> aiohttp.ClientWebSocketResponse:
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
        self, socket: WebSocketSession, upstream: aiohttp.ClientWebSocketResponse, first: asyncio.Future[Any]
    ) -> None:
        backend, call = socket.backend, socket.call
        assert call.worker is not None
        self._slots.record_queue_phase(call, call.worker)
        opened_ns = time.monotonic_ns()
        call.timeline.add("execute", call.dispatched_ns, opened_ns)
        call.begun, call.status = True, SWITCHING_PROTOCOLS
        headers = platform_headers(backend, call, call.worker)
        await socket.send({"type": "websocket.accept", "subprotocol": upstream.protocol, "headers": headers})
        close = await socket.passed(upstream, first)
        call.timeline.add("respond", opened_ns, time.monotonic_ns())
        call.error = close.error
        self._recorder.detach(backend, call, waive=close.error == WorkerLost.code)
        self._recorder.record(backend, call)
        if not close.by_client:
            await socket.close(close)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await upstream.close(code=sendable(close.code), message=close.reason.encode())
