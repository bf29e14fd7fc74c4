"""HTTP server of a worker: uvicorn, started, drained and stopped by the worker.

uvicorn's own main loop and shutdown, which poll every tenth of a second, are not used: a drained worker ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from socket import socket
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..worker_io.asgi import App
from .websockets import MESSAGE_MAX_BYTES

KEEP_ALIVE_S = 3600
"""Keep-alive timeout. The gateway closes connections; a worker that closed one first would race with a call on it."""
FLUSH_S = 1.0
"""Longest wait of a drained worker for slow readers of its last bytes."""


class WorkerServer:
    """uvicorn on a socket that the node opened, or on connections that the node accepted."""

    def __init__(self, app: App, *, lifespan: bool) -> None:
        # "auto", because most apps that are not frameworks do not support lifespan.
        config = uvicorn.Config(
            _typed(app),
            http="httptools",
            ws=WebSocketsSansIOProtocol,
            ws_max_size=MESSAGE_MAX_BYTES,
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
        # The call gate has logged what an app raised, with the call's id.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._connections: set[asyncio.Task[object]] = set()

    async def start(self, sock: socket | None) -> None:
        """Starts to accept; without a socket, `serve_connection` brings connections. Errors: RuntimeError if the app's
        lifespan start-up failed."""
        try:
            await self._server.startup(sockets=[sock] if sock is not None else [])
        except SystemExit:
            raise RuntimeError("the app's lifespan start-up failed; its log says why") from None

    def serve_connection(self, connection: socket) -> None:
        """Serves a connection that the node has accepted."""
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._connections.add(connecting)
        connecting.add_done_callback(self._connections.discard)

    def _protocol(self) -> asyncio.Protocol:
        """A protocol object as uvicorn creates it for its own connections."""
        config, server = self._server.config, self._server
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        return make(config=config, server_state=server.server_state, app_state=server.lifespan.state)

    async def stop(self) -> None:
        """Stops accepting, lets open connections flush, then runs the app's lifespan shutdown."""
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
    """Casts the app: uvicorn types scopes as closed TypedDicts, ours are open mappings as in ASGI."""
    return app
