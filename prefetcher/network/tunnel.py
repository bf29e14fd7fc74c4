"""Bytes between two sockets, both ways, until both have said their last or neither says anything. Owns neither."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

BUFFER_BYTES = 64 * 1024
"""Of each direction at most: what is not read by one side is not taken from the other. Nothing while it is quiet."""


async def carry(
    client: socket.socket, server: socket.socket, *, idle_s: float, count: Callable[[int, int], None]
) -> None:
    """`count` gets bytes that went (out, in). Errors: TimeoutError when nothing moved for `idle_s`."""
    async with asyncio.timeout(idle_s) as idle:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_one_way(client, server, idle, idle_s, lambda size: count(size, 0)))
                group.create_task(_one_way(server, client, idle, idle_s, lambda size: count(0, size)))
        except* OSError:
            pass  # one of them is gone: the other will see both sockets close


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
        await loop.sock_sendall(sink, data)
        del data
        if not idle.expired():
            idle.reschedule(loop.time() + idle_s)
    with contextlib.suppress(OSError):  # it may have gone as well
        sink.shutdown(socket.SHUT_WR)
