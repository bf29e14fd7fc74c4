"""Notices that the host of a worker is gone while a call waits for the worker's next bytes.

A connection to a host that lost its power or its cable stays silent for ever, like one to a worker that has much to
do. So after a short silence the host is asked: its kernel answers a new connection whatever its processes are at, so
that a slow or a stuck worker is never taken for a lost one. Only who was silent is asked, and less and less often.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from collections.abc import Awaitable
from typing import TypeVar

from .errors import HostSilent

SILENT_S = 0.4
"""Of a stream's tokens, a few; of a link, many round trips."""
MAX_PROBE_INTERVAL_S = 10.0
"""Longest time between two questions. A worker that does not accept holds 256 connections that nobody waits for."""
PROBES = 3
PROBE_EVERY_S = 0.27
"""A packet or two may be lost; a second after a host has gone quiet it is known to be gone."""
_UNREACHED = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT))

Value = TypeVar("Value")


class HostLiveness:
    """Of one call at one worker. Costs a timer; a task only while the worker is silent. Used by one task."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is `host:port`; one whose host is a name is not watched, because to look it up takes time."""
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._since_s: float | None = None
        """Since when its bytes are waited for."""
        self._lost = False
        self._seldom = False
        self._asking: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(SILENT_S, self._look)

    async def wait(self, awaited: Awaitable[Value]) -> Value:
        """What the worker gives. Errors: HostSilent; and what `awaited` raises."""
        self._since_s = self._loop.time()
        if self._seldom:
            self._look_in(SILENT_S)
        try:
            return await awaited
        except asyncio.CancelledError:
            # Unless somebody else wants it to end as well.
            if self._lost and self._task is not None and self._task.uncancel() <= self._cancelling:
                raise HostSilent from None
            raise
        finally:
            self._since_s = None

    def close(self) -> None:
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look_in(self, wait_s: float) -> None:
        self._seldom = wait_s > SILENT_S
        self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        silent_s = self._loop.time() - self._since_s if self._since_s is not None else 0.0
        if silent_s < SILENT_S:
            self._look_in(SILENT_S - silent_s)
        elif self._asking is None:
            self._asking = self._loop.create_task(self._ask(self._since_s))

    async def _ask(self, since_s: float | None) -> None:
        address = numeric_address(self._endpoint)
        answers = address is None or await responds(address)
        self._asking = None
        if answers or self._since_s != since_s:
            silent_s = self._loop.time() - self._since_s if self._since_s is not None else 0.0
            self._look_in(min(max(silent_s, SILENT_S), MAX_PROBE_INTERVAL_S))
        elif self._task is not None:
            self._lost = True
            self._task.cancel()


Address = tuple[socket.AddressFamily, tuple[str, int]]


def numeric_address(endpoint: str) -> Address | None:
    """None if its host is a name."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    family, _, _, _, where = found[0]
    return family, (str(where[0]), int(where[1]))


async def responds(address: Address) -> bool:
    """Whether the host answers one of a few knocks. Takes a moment also if it does: nobody waits for that.

    The answers are in the sockets, however late this process comes to look: one that is busy blames nobody else.
    """
    knocks: list[socket.socket] = []
    try:
        for _ in range(PROBES):
            try:
                knocks += _probe(*address)
            except OSError:
                return True  # no descriptors, no ports: that says nothing of the host
            await asyncio.sleep(PROBE_EVERY_S)
            if any(map(_responded, knocks)):
                return True
        return False
    finally:
        for knock in knocks:
            knock.close()


def _probe(family: socket.AddressFamily, where: tuple[str, int]) -> list[socket.socket]:
    """A connection under way; none if there is no way at the moment."""
    knock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    code = knock.connect_ex(where)
    if code in (0, errno.EINPROGRESS):
        return [knock]
    knock.close()
    if code in _UNREACHED:
        return []
    raise OSError(code, os.strerror(code))


def _responded(knock: socket.socket) -> bool:
    """A refusal is an answer, too."""
    poll = select.poll()
    poll.register(knock, select.POLLOUT)
    return bool(poll.poll(0)) and knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _UNREACHED
