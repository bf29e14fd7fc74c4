"""The controller's listening socket and its uvicorn server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from .config import Config
from .observability.request_id_middleware import RequestIdMiddleware

KEEP_ALIVE_S = 75
BACKLOG = 1024
CANCELLED_S = 1.0
"""Maximum wait for calls cancelled by the drain timeout to record their end: a client may read nothing."""


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the ledger is written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains as uvicorn does, then waits for the calls that were cancelled: the ledger's last rows are theirs."""
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):
            await asyncio.wait(cancelled, timeout=CANCELLED_S)


def server_of(config: Config, app: RequestIdMiddleware) -> UvicornServer:
    return UvicornServer(
        uvicorn.Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=config.max_body_bytes,
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        )
    )


def listener_of(config: Config) -> socket.socket:
    """The listening socket: the inherited one, or a new one."""
    if config.listen_fd is not None:
        inherited = socket.socket(fileno=config.listen_fd)
        inherited.setblocking(False)
        return inherited
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    created = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    return socket.socket(fileno=created.detach())  # knows its protocol, as asyncio asks before it sets TCP_NODELAY
