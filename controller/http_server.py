"""The controller's listening sockets and its uvicorn server."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import uvicorn

from .config import Config
from .http.connection_limits import ConnectionTable, LimitedHttpProtocol, connections_max
from .http.tls import RenewedCertificate
from .http.websocket import WebSocketProtocol
from .observability.request_id_middleware import RequestIdMiddleware

KEEP_ALIVE_S = 75
BACKLOG = 1024
TLS_HANDSHAKE_S = 10.0
CANCELLED_S = 1.0
"""Maximum wait for calls cancelled by the drain timeout to record their end: a client may read nothing."""


class Listener(NamedTuple):
    """A listening socket, and its TLS context if connections to it are encrypted."""

    socket: socket.socket
    tls: ssl.SSLContext | None = None

    @property
    def host(self) -> str:
        return str(self.socket.getsockname()[0])


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the ledger is written, and with sockets
    of which some have TLS and some do not."""

    def __init__(self, config: uvicorn.Config, listeners: Sequence[Listener]) -> None:
        super().__init__(config)
        self._listeners = listeners
        self._table = ConnectionTable(connections_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in self._listeners:
            server = await asyncio.get_running_loop().create_server(
                self._new_connection,
                sock=listener.socket,
                ssl=listener.tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_S if listener.tls else None,
                backlog=BACKLOG,
            )
            self.servers.append(server)

    def _new_connection(self) -> asyncio.Protocol:
        return LimitedHttpProtocol(self.config, self.server_state, self.lifespan.state, self._table)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains as uvicorn does, then waits for the calls that were cancelled: the ledger's last rows are theirs."""
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):
            await asyncio.wait(cancelled, timeout=CANCELLED_S)


def server_of(config: Config, app: RequestIdMiddleware, listeners: Sequence[Listener]) -> UvicornServer:
    return UvicornServer(
        uvicorn.Config(
            app,
            http="httptools",
            ws=WebSocketProtocol,
            ws_max_size=config.max_body_bytes,
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(config.trusted_proxies),
            forwarded_allow_ips=[str(network) for network in config.trusted_proxies],
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        ),
        listeners,
    )


def certificate_of(config: Config) -> RenewedCertificate | None:
    """The certificate of the listening sockets, None without TLS. Errors: ConfigError."""
    return RenewedCertificate(config.tls_cert, config.tls_key) if config.tls_cert else None


def listeners_of(config: Config, certificate: RenewedCertificate | None) -> list[Listener]:
    """The listening sockets: the inherited ones, or a new one."""
    tls = certificate.context if certificate is not None else None
    if config.listen_fd is None:
        return [Listener(_created(config), tls)]
    inherited = [Listener(_inherited(config.listen_fd))]  # for this machine: no TLS
    if config.public_fd is not None:
        inherited.append(Listener(_inherited(config.public_fd), tls))
    return inherited


def _inherited(descriptor: int) -> socket.socket:
    inherited = socket.socket(fileno=descriptor)
    inherited.setblocking(False)
    return inherited


def _created(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    created = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    return socket.socket(fileno=created.detach())  # knows its protocol, as asyncio asks before it sets TCP_NODELAY
