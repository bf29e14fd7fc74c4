"""WebSockets to functions that are ASGI apps: a proxy between the client and a worker.

A WebSocket is a call: it waits for a worker as others do, keeps its slot while it is open, and is billed for that time.
It ends when either side closes it, or with a code: 1012 when its worker is drained (connect again, to another one),
1011 when its worker was lost, 1009 for a message that is too large, 1008 at its deadline, 1001 after IDLE_S without
messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from fleetstart.runtime.contract.billing.ledger import CLIENT_GONE
from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError, InvalidInput, Unavailable, WorkerLost
from fleetstart.runtime.contract.ids import InvocationId, new_invocation_id
from fleetstart.runtime.contract.worker_headers import (
    BUSY_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    ERROR_HEADER,
    REQUEST_HEADER,
    ROOT_PATH_HEADER,
    TOKEN_HEADER,
)

from ..billing.budget_watch import BudgetWatch
from ..http.asgi import Receive, Scope, Send
from ..http.client import WorkerWebSocket
from ..http.headers import accept_headers, request_headers, valid_request_id
from ..http.invoke_url import parse_target
from ..http.request_body import header
from ..http.scope import GIVEN_REQUEST_ID
from ..http.websocket import SWITCHING_PROTOCOLS, reject_handshake
from .admission.admission import AdmissionControl
from .dispatch.call_endings import CallEndings
from .dispatch.call_record import CLIENT_CLOSED_REQUEST, CallRecorder
from .dispatch.call_response import platform_headers
from .dispatch.dispatcher import FinalStatus, SlotAcquirer
from .dispatch.retry_policy import CLOSED, LostWorkers, is_billed_when_cut
from .dispatch.version_backend import SUSPECT_BACKOFF_NS, Attempt, Call, Worker
from .node_links import NodeLinks, NodeNotVouched
from .router import Router
from .websocket_session import CLOSE_S, LOST, SocketClose, WebSocketSession, cancel_and_wait, sendable

log = logging.getLogger(__name__)
HEARTBEAT_S = 20.0
"""Interval of pings to the worker: a silent host is noticed after one and a half of them."""


class WebSocketRejected(FleetError):
    code = "socket_refused"

    def __init__(
        self, message: str, status: int, *, hint: str = "the function's own app decides which WebSockets it accepts"
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status  # type: ignore[misc]  # the app's own


class WebSocketProxy:
    """The WebSocket side of a gateway. Shares the router, recorder and admission control of its calls."""

    def __init__(
        self,
        router: Router,
        recorder: CallRecorder,
        admission: AdmissionControl,
        slots: SlotAcquirer,
        session: aiohttp.ClientSession,
        links: NodeLinks,
        billing: BudgetWatch,
        endings: CallEndings,
        *,
        final_status: FinalStatus,
    ) -> None:
        self._router = router
        self._recorder = recorder
        self._admission = admission
        self._slots = slots
        self._session = session
        self._links = links
        self._billing = billing
        self._endings = endings
        self._final_status = final_status

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
                headers=[pair for pair in request_headers(scope) if not pair[0].startswith("sec-websocket")],
                body=b"",
                accepted_ns=accepted_ns,
                accepted_unix_ns=accepted_unix_ns,
                deadline_ns=accepted_ns + round(limits.timeout_s * 1e9),
                queue_ends_ns=accepted_ns + round(limits.queue_s * 1e9) if limits.queue_s is not None else 0,
                price=self._billing.price(accepted_unix_ns // 1_000_000),
                key=scope.get("fs.key", ""),
                root=target.root,
                request_id=scope.get(GIVEN_REQUEST_ID, ""),
            )
            record = self._recorder.open(backend, call)
            await self._serve(WebSocketSession(record, scope, receive, send, limits.max_body_bytes))
        except FleetError as refusal:
            await reject_handshake(send, refusal, request_id)
        finally:
            self._admission.release(limits)

    async def _serve(self, session: WebSocketSession) -> None:
        record = session.record
        try:
            await self._connect_and_relay(session)
        except FleetError as error:
            record.fail(error)
            await reject_handshake(session.send, error, record.call.id, platform_headers(record)[1:])
        except asyncio.CancelledError:
            record.set_outcome(record.status or 503, Unavailable.code)
            raise
        except Exception as error:
            log.exception("a WebSocket failed in the gateway", extra={"invocation": record.call.id})
            record.fail(FleetError(f"{type(error).__name__} in the gateway"))
            with contextlib.suppress(Exception):
                await session.close(SocketClose(LOST, "internal"))
        finally:
            record.close()

    async def _connect_and_relay(self, session: WebSocketSession) -> None:
        """Errors: FleetError if it was not opened."""
        record = session.record
        first = asyncio.ensure_future(session.receive())
        connecting = asyncio.ensure_future(self._connect(session))
        try:
            left_s = max(0.0, (record.call.deadline_ns - time.monotonic_ns()) / 1e9)
            await asyncio.wait({first, connecting}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                if first.done():
                    record.set_outcome(CLIENT_CLOSED_REQUEST, CLIENT_GONE)
                    return
                name = record.backend.key.name
                raise DeadlineExceeded(f"function {name}: no worker took the WebSocket before its deadline")
            attempt, upstream = connecting.result()
        finally:
            await cancel_and_wait(connecting)
            if not connecting.done() or connecting.cancelled() or connecting.exception() is not None:
                await cancel_and_wait(first)
        try:
            await self._relay(session, attempt, upstream, first)
        finally:
            await cancel_and_wait(first)
            await upstream.close()

    async def _connect(self, session: WebSocketSession) -> tuple[Attempt, aiohttp.ClientWebSocketResponse]:
        """Errors: FleetError."""
        record = session.record
        name = record.backend.key.name
        lost = LostWorkers()
        while True:
            attempt = await self._slots.acquire(record, again=record.attempts > 0)
            try:
                return attempt, await self._request(session, attempt.worker)
            except aiohttp.WSServerHandshakeError as error:
                headers: Mapping[str, str] = error.headers or {}
                if error.status != 503 or not (BUSY_HEADER in headers or DRAINING_HEADER in headers):
                    if headers.get(ERROR_HEADER) == InvalidInput.code:
                        text = f"function {name} does not accept WebSockets"
                        raise WebSocketRejected(text, error.status, hint="only ASGI apps do") from error
                    status = error.status if error.status >= 400 else 502
                    text = f"function {name} rejected the WebSocket with HTTP {error.status}"
                    raise WebSocketRejected(text, status) from error
                record.release_refused(attempt)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, NodeNotVouched):
                record.release_for_retry(attempt, SUSPECT_BACKOFF_NS)
            except (aiohttp.ClientError, ConnectionError) as error:
                record.release_for_retry(attempt, SUSPECT_BACKOFF_NS)
                ended = await self._final_status(attempt.worker.id)
                spec, request = record.backend.spec, record.call.id
                failure = lost.count(spec, request, attempt.entered_before, ended, CLOSED)
                if failure is not None:
                    raise failure from error

    async def _request(self, session: WebSocketSession, worker: Worker) -> aiohttp.ClientWebSocketResponse:
        call = session.record.call
        left_ms = max(0, call.deadline_ns - time.monotonic_ns()) // 1_000_000
        headers = [
            *call.headers,
            (TOKEN_HEADER, worker.status.token),
            (REQUEST_HEADER, call.id),
            (DEADLINE_HEADER, str(left_ms)),
            (ROOT_PATH_HEADER, call.root),
            *session.record.call_headers(),
        ]
        url, tls = self._links.target(worker.status, call.target)
        return await self._session.ws_connect(
            url,
            headers=headers,
            protocols=session.scope.get("subprotocols") or (),
            max_msg_size=session.max_message_bytes + 1,  # aiohttp takes less than this
            heartbeat=HEARTBEAT_S,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            autoclose=False,
            **tls,
        )

    async def _relay(
        self,
        session: WebSocketSession,
        attempt: Attempt,
        upstream: aiohttp.ClientWebSocketResponse,
        first: asyncio.Future[Any],
    ) -> None:
        record = session.record
        opened_ns = time.monotonic_ns()
        record.answered(attempt, SWITCHING_PROTOCOLS, "", opened_ns)
        record.response_started()
        own = upstream.headers if isinstance(upstream, WorkerWebSocket) else ()
        headers = accept_headers(own, root=record.call.root) + platform_headers(record)
        await session.send({"type": "websocket.accept", "subprotocol": upstream.protocol, "headers": headers})
        close = await session.relay(attempt, upstream, first)
        ended_ns = time.monotonic_ns()
        record.responded(opened_ns, ended_ns)
        record.set_outcome(SWITCHING_PROTOCOLS, close.error)
        if close.by_client:
            await _close(upstream, close)
            await self._endings.wait(record)
            return
        lost = close.error == WorkerLost.code
        waive = lost and not is_billed_when_cut(await self._final_status(attempt.worker.id))
        record.release(waive=waive, until_ns=ended_ns)
        record.finish()
        await session.close(close)
        await _close(upstream, close)


async def _close(upstream: aiohttp.ClientWebSocketResponse, close: SocketClose) -> None:
    """Closes the worker's side."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
        async with asyncio.timeout(CLOSE_S):
            await upstream.close(code=sendable(close.code), message=close.reason.encode())
