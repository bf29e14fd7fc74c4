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
from collections.abc import Callable

from fleetstart.prefetcher.accepting import Acceptor
from fleetstart.prefetcher.side_loop import SideLoop
from fleetstart.prefetcher.tunnel import carry

log = logging.getLogger(__name__)

IDLE_S = 7200.0
"""The gateway decides when its connections end; one that said nothing for longer has no gateway any more."""

Hand = Callable[[socket.socket], object]
"""Gives a worker its end of a connection, on the daemon's own loop. Owns it from then on."""


def open_doorway(side: SideLoop, listener: socket.socket, hand: Hand) -> Callable[[], None]:
    """Owns the listener from now on. What is returned ends the way in."""
    home = asyncio.get_running_loop()

    def take(caller: socket.socket) -> None:
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours, its = socket.socketpair()
        except OSError as error:
            log.warning("a call's connection cannot be handed on", extra={"error": str(error)})
            caller.close()
            return
        ours.setblocking(False)
        acceptor.begin(_carry(caller, ours), caller.close, ours.close)
        try:
            home.call_soon_threadsafe(hand, its)
        except RuntimeError:
            its.close()  # the daemon's loop has ended

    acceptor = Acceptor(listener, take)
    side.call(acceptor.start)
    return lambda: side.call(acceptor.end)


async def _carry(caller: socket.socket, worker: socket.socket) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        await carry(caller, worker, idle_s=IDLE_S, count=lambda sent, received: None)
