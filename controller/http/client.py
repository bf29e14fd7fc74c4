"""The HTTP client with which the gateway reaches workers."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp.connector import Connection

CONNECT_S = 2.0

_NO_AUTO = frozenset(("User-Agent", "Accept", "Accept-Encoding", "Content-Type"))

CONNECTED: ContextVar[bool] = ContextVar("connected", default=False)
"""True if the request under way in this task has a connection: without one, nothing of it was sent."""


class _Connector(aiohttp.TCPConnector):
    """The usual connector; it also notes when a request gets its connection, in `CONNECTED`."""

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        CONNECTED.set(False)
        connection = await super().connect(*args, **kwargs)
        CONNECTED.set(True)
        return connection


class WorkerWebSocket(aiohttp.ClientWebSocketResponse):
    """A WebSocket to a worker, with the headers with which its app accepted it."""

    def __init__(
        self, reader: Any, writer: Any, protocol: Any, response: aiohttp.ClientResponse, *more: Any, **options: Any
    ) -> None:
        super().__init__(reader, writer, protocol, response, *more, **options)
        self.headers = response.raw_headers


def open_session() -> aiohttp.ClientSession:
    session = aiohttp.ClientSession(
        ws_response_class=WorkerWebSocket,
        connector=_Connector(limit=0, keepalive_timeout=600, use_dns_cache=False),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_NO_AUTO,
        max_line_size=65536,
        max_field_size=65536,
    )
    # Else aiohttp sends a GET, PUT or DELETE again by itself if a kept connection breaks, whatever was run.
    session._retry_connection = False
    return session
