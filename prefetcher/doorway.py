"""The way in to workers that cannot listen where their callers would find them: inside gVisor, sockets are its own.

The node listens for such a worker, and for each connection makes a pair of sockets, of which the worker gets one end
over its control socket. Bytes are carried between the two until both have said their last. A doorway ends with its
worker, connections included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from fleetstart.prefetcher.side_loop import SideLoop
from fleetstart.prefetcher.tunnel import carry

log = logging.getLogger(__name__)

IDLE_S = 7200.0
"""The gateway decides when its connections end; one that said nothing for longer has no gateway any more."""
ACCEPT_PAUSE_S = 0.1
"""When the process has no descriptor left."""

Hand = Callable[[socket.socket], object]
"""Gives a worker its end of a connection, on the daemon's own loop. Owns it from then on."""


def open_doorway(side: SideLoop, listener: socket.socket, hand: Hand) -> Callable[[], None]:
    """Owns the listener from now on. What is returned ends the way in."""
    home = asyncio.get_running_loop()

    def pass_on(end: socket.socket) -> None:
        try:
            home.call_soon_threadsafe(hand, end)
        except RuntimeError:
            end.close()  # the daemon's loop has ended

    doorway = Doorway(listener, pass_on)
    side.call(doorway.start)
    return lambda: side.call(doorway.end)


class Doorway:
    """Of one worker. Lives in the side loop."""

    def __init__(self, listener: socket.socket, hand: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._hand = hand
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listen()
        # So that the loop's end is its own: that ends all tasks.
        self._begin(asyncio.Event().wait(), self._shut)

    def end(self) -> None:
        self._shut()
        for task in self._tasks:
            task.cancel()

    def _shut(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _begin(self, work: Coroutine[Any, Any, object], *after: Callable[[], object]) -> None:
        """`after` is not done in the task itself: one that is ended before its first step never runs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: [each() for each in after])

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            # Not sock_accept: what that accepts in the turn in which it is cancelled, nobody closes.
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listener.fileno() < 0:
            return  # ended in this very turn
        try:
            caller, _ = self._listener.accept()
            ours, its = _pair(caller)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("a call's connection cannot be taken", extra={"error": str(error)})
            loop.remove_reader(self._listener)
            loop.call_later(ACCEPT_PAUSE_S, self._listen)
            return
        self._begin(_carry(caller, ours), caller.close, ours.close)
        self._hand(its)


def _pair(caller: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Our end and the worker's; the caller's socket is closed if there is none. Errors: OSError."""
    caller.setblocking(False)
    try:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, its = socket.socketpair()
    except OSError:
        caller.close()
        raise
    ours.setblocking(False)
    return ours, its


async def _carry(caller: socket.socket, worker: socket.socket) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        await carry(caller, worker, idle_s=IDLE_S, count=lambda sent, received: None)
