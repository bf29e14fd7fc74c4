"""Accept loop of a listening socket. Closing it cancels the tasks of its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

PAUSE_S = 0.1
"""Pause when the process has no descriptor left."""


class Acceptor:
    """Owns one listening socket. `on_connection` gets each connection, non-blocking, and owns it.

    All tasks spawned here end with it, and it ends with its loop. Not sock_accept: a connection that it accepts in
    the turn in which it is cancelled is never closed.
    """

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listen()
        self.spawn(
            asyncio.Event().wait(), self._close_listener
        )  # at the loop's end all tasks are cancelled, this one too

    def stop(self) -> None:
        self._close_listener()
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: Coroutine[Any, Any, object], *after: Callable[[], object]) -> None:
        """Starts a task. `after` runs once it has ended, outside the task: one that is cancelled before its first
        step never runs."""
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
            return  # closed in this very turn of the loop
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("cannot accept a connection", extra={"error": str(error)})
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(PAUSE_S, self._listen)
            return
        connection.setblocking(False)
        self._on_connection(connection)
