"""Copies bytes between two sockets, both ways, until both sides have closed or the connection is idle. Owns neither."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

BUFFER_BYTES = 64 * 1024
"""Buffer of each direction at most: what one side does not read is not read from the other. Empty while idle."""


async def carry(
    client: socket.socket, server: socket.socket, *, idle_s: float, count: Callable[[int, int], None]
) -> None:
    """Copies until both sides have closed. `count` gets the bytes (sent, received). Errors: TimeoutError after
    `idle_s` without a byte."""
    async with asyncio.timeout(idle_s) as idle:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_one_way(client, server, idle, idle_s, lambda size: count(size, 0)))
                group.create_task(_one_way(server, client, idle, idle_s, lambda size: count(0, size)))
        except* OSError:
            pass  # one side is gone: the caller closes both sockets


async def _one_way(
    source: socket.socket,
    sink: socket.socket,
    idle: asyncio.Timeout,
    idle_s: float,
    count: Callable[[int], None],
) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, BUFFER_BYTES):
        count(len(data))
        try:
            await loop.sock_sendall(sink, data)
        except OSError:
            return  # what the sink had sent before it broke off is still delivered: the other way ends after it
        del data
        if not idle.expired():
            idle.reschedule(loop.time() + idle_s)
    with contextlib.suppress(OSError):  # the sink may be gone as well
        sink.shutdown(socket.SHUT_WR)
