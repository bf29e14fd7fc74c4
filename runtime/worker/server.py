"""The worker's HTTP door: who may call, how many at once, for how long, and how it closes.

Every form of function is an ASGI app by the time it gets here; this wraps it. The door checks the
worker's secret, takes a slot or says 503 (nothing was run, send it elsewhere), gives the call its
deadline, and meters it. uvicorn speaks the HTTP; its own main loop and shutdown, which poll every tenth
of a second, are not used: a drained worker leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Callable
from socket import socket
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..contract.errors import DeadlineExceeded, FleetError, HandlerFailed, Refused, Unavailable
from ..contract.worker_headers import BUSY_HEADER, DEADLINE_HEADER, DRAINING_HEADER, REQUEST_HEADER, TOKEN_HEADER
from ..worker_io import user_errors as blame
from ..worker_io.asgi import App, Headers, Message, Receive, ResponseAborted, Scope, Send, respond_error
from ..worker_io.log_tagging import CURRENT_REQUEST_ID
from . import websockets as sockets
from .meter import Meter

KEEP_ALIVE_S = 3600
"""The gateway decides when its connections end; a worker that closed one first would race with a call on it."""
FLUSH_S = 1.0
"""How long a drained worker waits for slow readers of its last bytes."""

_TOKEN = TOKEN_HEADER.encode()
_REQUEST = REQUEST_HEADER.encode()
_DEADLINE = DEADLINE_HEADER.encode()


class InvalidWorkerToken(FleetError):
    """The caller is not the gateway."""

    code = "unauthorized"
    status = 401


class CallGate:
    """An ASGI app around the function's app.

    `changed` is called when a call begins or ends: the shell reports usage and notices the end of a drain. `sockets`
    says whether the app may know what a WebSocket is: the user's own does.
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
    ) -> None:
        self._app = app
        self._sockets = sockets
        self._token = token.encode()
        self._meter = meter
        self._bundle_dir = bundle_dir
        self._changed = changed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            send = sockets.denying(send)
        token, request, deadline = _headers(scope)
        if not hmac.compare_digest(token, self._token):
            await respond_error(send, InvalidWorkerToken("this worker answers its gateway only"), request)
            return
        if scope["type"] == "websocket" and not self._sockets:
            await respond_error(send, sockets.NOT_TAKEN, request)
            return
        now_ns = time.monotonic_ns()
        timeout_s = _seconds(deadline)
        number = self._meter.begin(request, now_ns, None if timeout_s is None else round(timeout_s * 1e9))
        if isinstance(number, str):
            await respond_error(send, *self._refusal(number, request))
            return
        self._changed()
        CURRENT_REQUEST_ID.set(request)
        try:
            if scope["type"] == "websocket":
                await sockets.serve(self._app, scope, receive, send, timeout_s, request)
            else:
                await self._call(scope, receive, send, request, timeout_s)
        finally:
            self._meter.end(number, time.monotonic_ns())
            self._changed()

    def _refusal(self, why: str, request: str) -> tuple[FleetError, str, Headers]:
        if why == "draining":
            text = "this worker is being drained and takes no more calls"
            return Unavailable(text, retry_after_s=0), request, [(DRAINING_HEADER.encode(), b"1")]
        text = f"all {self._meter.slots} slots of this worker are taken"
        return Unavailable(text, retry_after_s=0), request, [(BUSY_HEADER.encode(), b"1")]

    async def _call(self, scope: Scope, receive: Receive, send: Send, request: str, timeout_s: float | None) -> None:
        """Runs the app; answers for it if it raised or overran before its response began."""
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        failure: FleetError
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                await self._app(scope, receive, sending)
            return
        except ResponseAborted:
            raise
        except Exception as error:
            if limit.expired():
                failure = DeadlineExceeded(
                    f"the call took longer than the {timeout_s:.3g} s that it had left",
                    hint="raise `timeout_s`, or make the handler quicker",
                )
            else:
                failure = self._blame(error, request)
        if begun:
            # The stream cannot be mended: uvicorn closes the connection, which tells the reader that it was cut.
            raise ResponseAborted from None
        await respond_error(send, failure, request)

    def _blame(self, error: Exception, request: str) -> FleetError:
        if isinstance(error, Refused):
            return error
        blame.log(error, f"call {request or '-'} failed:")
        if isinstance(error, FleetError):
            return error
        return HandlerFailed(blame.describe(error, self._bundle_dir), hint="the traceback is in the function's log")


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
    """None without the header, or with one that is not a number: the gateway keeps the deadline as well."""
    try:
        left_ms = float(deadline_ms)
    except ValueError:
        return None
    return max(left_ms, 0.0) / 1e3 if math.isfinite(left_ms) else None


class WorkerServer:
    """uvicorn on a socket that was opened by the daemon, with the ends of its life in our hands."""

    def __init__(self, app: App, *, lifespan: bool) -> None:
        # A lifespan is asked for by "auto", because most apps that are not frameworks do not know it.
        config = uvicorn.Config(
            _typed(app),
            http="httptools",
            ws=WebSocketsSansIOProtocol,
            ws_max_size=sockets.MESSAGE_MAX_BYTES,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="auto" if lifespan else "off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        # What an app raised is in the log by then, once, with the call's id.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._taking: set[asyncio.Task[object]] = set()

    async def start(self, sock: socket | None) -> None:
        """Without a socket, connections come by `take`. Errors: RuntimeError if the app's own start-up failed."""
        try:
            await self._server.startup(sockets=[sock] if sock is not None else [])
        except SystemExit:
            raise RuntimeError("the app's lifespan start-up failed; its log says why") from None

    def take(self, connection: socket) -> None:
        """Serves what somebody else has accepted."""
        loop = asyncio.get_running_loop()
        taking = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn makes it for what it accepts itself."""
        config, server = self._server.config, self._server
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        return make(config=config, server_state=server.server_state, app_state=server.lifespan.state)

    async def stop(self) -> None:
        """Takes no more connections, lets the open ones send what they have, then the app's own shutdown."""
        for server in self._server.servers:
            server.close()
        connections = self._server.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while connections:
                    await asyncio.sleep(0.005)
                await self._server.lifespan.shutdown()


def _typed(app: App) -> Any:
    """uvicorn types scopes as closed TypedDicts; ours are open mappings, as ASGI says."""
    return app
