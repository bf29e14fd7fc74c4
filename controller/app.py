"""The controller: gateway, API, scheduler and ledger writer in one event loop, with graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time

from fleetstart.runtime.contract.process.environment import ConfigError
from fleetstart.runtime.contract.process.tasks import end_tasks

from .api_wiring import build_management
from .auth.bootstrap_key import BootstrapKey
from .auth.middleware import AuthMiddleware, is_loopback
from .auth.owner_key_file import FILE
from .background import run_with_restarts
from .config import Config
from .core_wiring import build_core
from .external_services import open_secret_cipher, open_traces
from .function_calls.function_calls import FunctionCalls
from .gateway.cors import Cors
from .http.asgi import Receive, Scope, Send
from .http.head_errors import HeadErrors
from .http.invoke_url import PREFIX
from .http.request_body import header
from .http.tls import with_hsts
from .http_server import certificate_of, listeners_of, server_of
from .observability.request_id_middleware import RequestIdMiddleware
from .observability.slow_call_log import SlowCallLog
from .state.redis_client import REDIS_ERRORS
from .state.redis_server.schema import claim_schema

log = logging.getLogger(__name__)

FIRST_READ_S = 1.0
"""Maximum delay of serving for the first read of Redis; without Redis serving begins all the same."""


class Controller:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self._drain_ends_s = 0.0
        """When calls may go on no longer, on the monotonic clock; 0 until it was told to stop."""
        cipher = open_secret_cipher(config)
        self._traces = open_traces(config.otlp_endpoint)
        self._core = core = build_core(config, "gw-" + secrets.token_hex(6), cipher)
        self._management = management = build_management(config, core, cipher, self._traces, self._stopping)
        self._invocations = management.invocations
        self._certificate = certificate_of(config)
        self._listeners = listeners_of(config, self._certificate)
        self._tls_ports = frozenset(one.socket.getsockname()[1] for one in self._listeners if one.tls is not None)
        self._public = [listener.host for listener in self._listeners if not is_loopback(listener.host)]
        """Addresses that other machines reach."""
        self._loopback = is_loopback(self._listeners[0].host)
        self._first_key: BootstrapKey | None = None
        self._makes_key = (self._loopback or config.first_key) and not config.open
        if self._makes_key:
            self._first_key = BootstrapKey(core.state, management.audit, config.home / FILE)
        self._auth_middleware = AuthMiddleware(
            self._authenticated,
            core.view,
            management.audit,
            management.rules,
            loopback=self._loopback,
            is_open=config.open,
        )
        self._cors = Cors(
            core.view, self._auth_middleware
        )  # outside: browsers ask without a key whether they may show one
        app = RequestIdMiddleware(self.asgi, refused=management.calls.refused, sample=self._traces is not None)
        self._function_calls = FunctionCalls(
            core.gateway_id,
            core.gateway.grants,
            core.gateway.session,
            core.links,
            core.view,
            RequestIdMiddleware(
                management.invocations.layer, refused=management.calls.refused, sample=self._traces is not None
            ),
            self._auth_middleware.rates,
            max_body_bytes=config.max_body_bytes,
        )
        self._server = server_of(config, app, self._listeners)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._tls_ports:
            send = with_hsts(scope, send, self._tls_ports)
        if scope["type"] == "http" and scope["method"] == "HEAD":
            send = HeadErrors(send).send
        if scope["type"] == "http" and scope["path"].startswith(PREFIX) and header(scope, b"origin") is not None:
            await self._cors(scope, receive, send)
        else:
            await self._auth_middleware(scope, receive, send)

    async def _authenticated(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(PREFIX):
            await self._invocations.layer(scope, receive, send)
        else:
            await self._management.api(scope, receive, send)  # starlette refuses WebSockets that have no route

    def stop(self) -> None:
        """Stops accepting connections; `run` returns when calls have ended, or at the drain timeout."""
        if not self._stopping.is_set():
            self._drain_ends_s = time.monotonic() + self._config.drain_s
        self._stopping.set()
        self._core.gateway.stop()
        self._invocations.stop()
        self._server.should_exit = True

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        own = [part for part in (self._first_key, self._certificate) if part is not None]
        parts = (*self._core.parts, *self._management.parts, *own)
        refusal = await self._schema_refusal()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # in a thread, for tests: signals are the main's
                loop.add_signal_handler(number, self.stop)
        ledger = self._core.ledger
        ledger.recover()
        ledger.on_trace(self._management.calls.ended)  # from now on: what others had answered, they had counted
        ledger.on_row(self._management.history.ended)
        ledger.on_trace(SlowCallLog().ended)
        if self._traces is not None:
            ledger.on_trace(self._traces.ended)
        log.info("controller serves", extra={"url": self._config.url, "gateway": self._core.gateway_id})
        background = [asyncio.create_task(run_with_restarts(part)) for part in (parts if refusal is None else ())]
        try:
            if refusal is None:
                await self._first_read()
                refusal = self._refusal()
            if refusal is None:
                await self._server.serve()
            await self._invocations.hand_back(max(0.0, self._drain_ends_s - time.monotonic()))
            await self._core.withdraw()
            await self._management.history.flush()
        finally:
            await end_tasks(background)
            await self._function_calls.close()
            await self._invocations.close()
            await self._core.close()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            for listener in self._listeners:
                listener.socket.close()
        if refusal is not None:
            raise refusal

    async def _first_read(self) -> None:
        """Waits for the first read of Redis. Connections queue in the socket's backlog: better than an answer from an
        empty view."""
        read, view = asyncio.Event(), self._core.view
        view.on_change(lambda: read.set() if view.synced else None)  # own reports change it, too
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await read.wait()
                await self._core.billing.known.wait()
                if self._first_key is not None:
                    await self._first_key.there.wait()

    async def _schema_refusal(self) -> ConfigError | None:
        """The error if Redis has records that this release would misread. If Redis does not answer, it serves all the
        same, as it does without its first read."""
        try:
            async with asyncio.timeout(FIRST_READ_S):
                await claim_schema(self._core.client)
        except ConfigError as error:
            return error
        except REDIS_ERRORS as error:
            log.warning("the schema in Redis is not known", extra={"error": str(error)})
        return None

    def _refusal(self) -> ConfigError | None:
        """The error if other machines could call without authentication."""
        if not self._public:
            return None
        host = self._public[0]
        if self._config.open:
            return ConfigError(
                f"{host} can be reached by other machines, and FS_OPEN=1 is for 127.0.0.1 alone: unset it"
            )
        if self._loopback or self._makes_key:
            return None  # the first key is created, and until then every request is rejected
        if not self._core.view.synced or self._core.view.access.locked:
            return None
        return ConfigError(
            f"{host} can be reached by other machines, and there are no API keys: start on 127.0.0.1 first "
            "(`fs up --redis URL` makes the first key), and start again; or have it made here, with FS_FIRST_KEY=1"
        )
