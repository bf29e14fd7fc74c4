"""Copying between two sockets: what one side sent before it went reaches the other."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Iterator

import pytest

from fleetstart.prefetcher.network.tunnel import carry
from tests.servers import wait_until

LAST_WORDS = b"x" * 48_000
"""More than the socket towards the server takes, so that a part waits when the client is gone."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket, socket.socket, socket.socket]]:
    """The client, the two ends between which bytes are carried, and the server."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = opened.enter_context(socket.create_connection(listener.getsockname()))
        near = opened.enter_context(listener.accept()[0])
        far, server = map(opened.enter_context, socket.socketpair())
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for one in (near, far, server):
            one.setblocking(False)
        yield client, near, far, server


def test_what_a_client_sent_before_it_broke_off_is_delivered(
    ends: tuple[socket.socket, socket.socket, socket.socket, socket.socket],
) -> None:
    """As a gateway does that refuses a message: its reason, then the end of the connection, with bytes unread."""
    client, near, far, server = ends
    server.sendall(b"what the client does not read")

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        carrying = loop.create_task(carry(near, far, idle_s=20, count=lambda sent, received: None))
        carrying.add_done_callback(lambda _: far.close())  # as the owners of the sockets do
        async with asyncio.timeout(20):
            while not _readable(client):
                await asyncio.sleep(0)
            client.sendall(LAST_WORDS)
            wait_until(lambda: _unacknowledged(client) == 0, 10, what="all of it at the other side")
            client.close()  # with bytes that it has not read: a reset
            found = b""
            while True:
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    server.send(b"more")
                await asyncio.sleep(0)
                try:
                    data = server.recv(100)
                except BlockingIOError:
                    continue
                except ConnectionResetError:  # what it sent was not read; what was sent to it comes before this
                    break
                if not data:
                    break
                found += data
            await carrying
        return found

    assert asyncio.run(run()) == LAST_WORDS


def _readable(client: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def _unacknowledged(client: socket.socket) -> int:
    (size,) = struct.unpack("i", fcntl.ioctl(client, termios.TIOCOUTQ, b"\0" * 4))
    return int(size)
