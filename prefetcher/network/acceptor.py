"""Takes what connects to a socket, for as long as whoever it is for lives; then nobody who comes is left waiting."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

PAUSE_S = 0.1
"""When the process has no descriptor left."""


class Acceptor:
    """Of one listening socket, which it owns. `on_connection` gets each connection, not blocking, and owns it.

    All tasks that are begun here end with it, and it with its loop. Not sock_accept: what that accepts in the turn in
    which it is cancelled, nobody closes.
    """

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listen()
        self.spawn(asyncio.Event().wait(), self._close_listener)  # the loop's end is told to tasks

    def stop(self) -> None:
        self._close_listener()
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: Coroutine[Any, Any, object], *after: Callable[[], object]) -> None:
        """`after` is not done in the task itself: one that is ended before its first step never runs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: [each() for each in after])

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        if self._listener.fileno() < 0:
            return  # ended in this very turn
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("a connection cannot be on_connection", extra={"error": str(error)})
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(PAUSE_S, self._listen)
            return
        connection.setblocking(False)
        self._on_connection(connection)
