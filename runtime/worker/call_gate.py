"""Call gate of a worker: authenticates, admits, meters and times each call, in front of the function's app.

Every kind of function is an ASGI app by now; the gate wraps it. It checks the worker's token, takes a slot or answers
503 (nothing ran, the gateway may send the call elsewhere), enforces the deadline, and turns what the app raises into an
error response. `redact_errors` is the outermost layer: it keeps secrets out of those responses.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..contract.errors import DeadlineExceeded, FleetError, HandlerFailed, Refused, Unavailable
from ..contract.node.messages import Usage
from ..contract.node.speed import Speed
from ..contract.process.redaction import Redactor
from ..contract.worker_headers import (
    BUSY_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    END_HEADER,
    ENTERED_HEADER,
    ERROR_HEADER,
    LINK_HEADER,
    LINK_LIMIT_HEADER,
    REQUEST_HEADER,
    TOKEN_HEADER,
)
from ..worker_io import user_errors
from ..worker_io.asgi import App, Headers, Message, Receive, ResponseAborted, Scope, Send, respond, respond_error
from ..worker_io.call_links import CallLinks
from ..worker_io.callee_errors import as_seen_outside
from ..worker_io.files_hint import files_hint
from ..worker_io.log_tagging import CURRENT_REQUEST_ID
from ..worker_io.network_hint import network_hint
from ..worker_io.response_check import CheckedResponse
from . import websockets

_TOKEN = TOKEN_HEADER.encode()
_REQUEST = REQUEST_HEADER.encode()
_DEADLINE = DEADLINE_HEADER.encode()
_ERROR = ERROR_HEADER.encode()
_ENTERED = ENTERED_HEADER.encode()
_END = END_HEADER.encode()
_LINK = LINK_HEADER.encode()
_LINK_LIMIT = LINK_LIMIT_HEADER.encode()
_ERROR_EVENT = b"event: error\n"


class InvalidWorkerToken(FleetError):
    """Error of a caller without the worker's token, which only its gateways have."""

    code = "unauthorized"
    status = 401


@dataclass(frozen=True, slots=True)
class RunningCall:
    """One running call. `ends_ns` is its deadline (monotonic), 0 without one."""

    request: str
    started_ns: int
    ends_ns: int


class Meter:
    """Slots, busy time and deadlines of one worker's running calls: plain values and `now_ns` in, decisions out.

    The watchdog reads from its own thread, so the table of calls only changes in single steps that the interpreter's
    lock makes atomic.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.draining = False
        self.standby = False
        """Set while weights are given back, or about to be: calls go to another worker."""
        self._calls: dict[int, RunningCall] = {}
        self._begun = 0
        self._busy_before_ns = 0
        self._busy_since_ns = 0
        self._speed: Speed | None = None

    @property
    def begun(self) -> int:
        """Number of calls that have had a slot."""
        return self._begun

    @property
    def running(self) -> int:
        """Number of running calls."""
        return len(self._calls)

    def begin(self, request: str, now_ns: int, timeout_ns: int | None) -> int | Literal["draining", "busy"]:
        """Takes a slot; returns the number to `end` the call with, or the reason of the rejection."""
        if self.draining or self.standby:
            return "draining"
        if len(self._calls) >= self.slots:
            return "busy"
        if not self._calls:
            self._busy_since_ns = now_ns
        self._begun += 1
        self._calls[self._begun] = RunningCall(request, now_ns, now_ns + timeout_ns if timeout_ns is not None else 0)
        return self._begun

    def end(self, number: int, now_ns: int) -> None:
        """Releases the slot of a call."""
        call_s = (now_ns - self._calls.pop(number).started_ns) / 1e9
        self._speed = Speed(calls=1, call_s=call_s, prefill_s=call_s).folded_into(self._speed)
        if not self._calls:
            self._busy_before_ns += now_ns - self._busy_since_ns

    def runs(self, request: str) -> bool:
        """Checks whether a call with that id runs."""
        return any(call.request == request for call in self._calls.values())

    def usage(self, now_ns: int) -> Usage:
        """Calls so far, running calls, busy time (with at least one running call) and mean speed."""
        busy_ns = self._busy_before_ns + (now_ns - self._busy_since_ns if self._calls else 0)
        return Usage(calls=self._begun, running=len(self._calls), busy_ns=busy_ns, speed=self._speed)

    def next_deadline_ns(self, now_ns: int) -> int | None:
        """The next moment at which a running call is at its deadline."""
        return min((call.ends_ns for call in tuple(self._calls.values()) if call.ends_ns > now_ns), default=None)

    def overrun(self, now_ns: int, grace_ns: int) -> RunningCall | None:
        """The call that is furthest past its deadline, if by more than `grace_ns`."""
        late = [call for call in tuple(self._calls.values()) if call.ends_ns and now_ns > call.ends_ns + grace_ns]
        return min(late, key=lambda call: call.ends_ns, default=None)


class CallGate:
    """ASGI middleware in front of the function's app.

    `changed` is called when a call begins or ends: the worker reports usage and notices the end of a drain. `sockets`:
    whether the app handles WebSockets, which only a user's own ASGI app does.
    """

    def __init__(
        self,
        app: App,
        *,
        token: str,
        meter: Meter,
        bundle_dir: str,
        changed: Callable[[], None],
        sockets: bool = False,
        network: bool | list[str] = True,
        entering: Callable[[int, str], object] = lambda number, request: None,
        links: CallLinks | None = None,
    ) -> None:
        """`network` is the function's setting, for the hint of an error that comes of it. `entering` is called with the
        number and id of a call before the app sees it. `links`: where WebSockets go that gateways open for the calls of
        the function itself."""
        self._links = links
        self._app = app
        self._sockets = sockets
        self._token = token.encode()
        self._meter = meter
        self._bundle_dir = bundle_dir
        self._changed = changed
        self._network = network
        self._entering = entering
        self._endings: dict[str, asyncio.Event] = {}
        """Events that are set at the ends of calls, by their ids, where somebody waits for one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            send = websockets.rejecting(send)
        token, request, deadline = _headers(scope)
        if not hmac.compare_digest(token, self._token):
            await respond_error(send, InvalidWorkerToken("this worker only accepts calls of its gateway"), request)
            return
        # An app that shows its request's headers must not show this one.
        scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != _TOKEN]}
        if scope["type"] == "websocket" and self._links is not None and (gateway := _header(scope, _LINK)):
            limit = _header(scope, _LINK_LIMIT)
            await self._links.serve(gateway, int(limit) if limit else None, receive, send)
            return
        if scope["type"] == "http" and _header(scope, _END):
            if self._meter.runs(request):
                await self._endings.setdefault(request, asyncio.Event()).wait()
            await respond(send, 200, b"", b"text/plain")
            return
        if scope["type"] == "websocket" and not self._sockets:
            await respond_error(send, websockets.NOT_SUPPORTED, request)
            return
        now_ns = time.monotonic_ns()
        timeout_s = _seconds(deadline)
        number = self._meter.begin(request, now_ns, None if timeout_s is None else round(timeout_s * 1e9))
        if isinstance(number, str):
            await respond_error(send, *self._rejection(number, request))
            return
        self._changed()
        CURRENT_REQUEST_ID.set(request)
        try:
            self._entering(number, request)
            if scope["type"] == "websocket":
                await websockets.serve(self._app, scope, receive, send, timeout_s, request)
            else:
                await self._call(scope, receive, send, request, timeout_s)
        finally:
            self._meter.end(number, time.monotonic_ns())
            if (ended := self._endings.pop(request, None)) is not None:
                ended.set()
            self._changed()

    def _rejection(self, why: str, request: str) -> tuple[FleetError, str, Headers]:
        if why == "draining":
            text = "this worker is draining and accepts no more calls"
            return Unavailable(text, retry_after_s=0), request, [(DRAINING_HEADER.encode(), b"1")]
        text = f"all {self._meter.slots} slots of this worker are in use"
        return Unavailable(text, retry_after_s=0), request, [(BUSY_HEADER.encode(), b"1")]

    async def _call(self, scope: Scope, receive: Receive, send: Send, request: str, timeout_s: float | None) -> None:
        """Runs the app; sends an error response if it raised or timed out before its response began."""
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                entered = (_ENTERED, b"%d" % self._meter.begun)
                message = {**message, "headers": [entered, *message.get("headers", ())]}
            await send(message)
            if message.get("more_body"):
                # Sending alone need not wait. An app that does nothing else would keep the loop from other calls, from
                # the end of its own time, and from learning that its client has left.
                await asyncio.sleep(0)

        failure: FleetError
        limit = asyncio.timeout(timeout_s)
        response = CheckedResponse(scope, receive, sending)
        try:
            async with limit:
                await self._app(scope, response.receive, response.send)
                await response.require_complete()
            return
        except ResponseAborted:
            raise
        except BaseException as raised:
            error = user_errors.of_user(raised)
            if limit.expired():
                failure = DeadlineExceeded(
                    f"the call took longer than the {timeout_s:.3g} s that it had left",
                    hint="raise `timeout_s`, or make the handler faster",
                )
            else:
                failure = self._error_of(error, request)
        if begun:
            # Too late for an error response: uvicorn closes the connection, which shows the reader a truncated stream.
            raise ResponseAborted from None
        await respond_error(sending, failure, request)

    def _error_of(self, error: Exception, request: str) -> FleetError:
        own = as_seen_outside(error) if isinstance(error, FleetError) else error
        if isinstance(own, Refused):
            return own
        user_errors.log(error, f"call {request or '-'} failed:")
        if isinstance(own, FleetError):
            return own
        hint = network_hint(error, self._network) or files_hint(error) or "the traceback is in the function's log"
        return HandlerFailed(user_errors.describe(error, self._bundle_dir), hint=hint)


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _headers(scope: Scope) -> tuple[bytes, str, bytes]:
    token, request, deadline = b"", "", b""
    for name, value in scope["headers"]:
        if name == _TOKEN:
            token = value
        elif name == _REQUEST:
            request = value.decode("latin-1")
        elif name == _DEADLINE:
            deadline = value
    return token, request, deadline


def _seconds(deadline_ms: bytes) -> float | None:
    """Remaining time in seconds; None without a valid header, since the gateway enforces the deadline as well."""
    try:
        left_ms = float(deadline_ms)
    except ValueError:
        return None
    return max(left_ms, 0.0) / 1e3 if math.isfinite(left_ms) else None


def redact_errors(app: App, redactor: Redactor) -> App:
    """Middleware that redacts secrets in error responses and error events; responses of the handler pass unchanged.

    Returns the app itself if there are no secrets.
    """
    if not redactor:
        return app

    async def redacting(scope: Scope, receive: Receive, send: Send) -> None:
        held: Message | None = None

        async def sending(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and any(name == _ERROR for name, _ in message["headers"]):
                held = message  # the redacted length is known with the body
                return
            if message["type"] == "http.response.body" and held is not None:
                body = redactor.data(message.get("body", b""))
                headers = [pair for pair in held["headers"] if pair[0] != b"content-length"]
                if not message.get("more_body", False):
                    headers.append((b"content-length", b"%d" % len(body)))
                start, held = {**held, "headers": headers}, None
                await send(start)
                await send({**message, "body": body})
                return
            if message["type"] == "http.response.body" and message.get("body", b"").startswith(_ERROR_EVENT):
                message = {**message, "body": redactor.data(message["body"])}
            await send(message)

        await app(scope, receive, sending)

    return redacting
