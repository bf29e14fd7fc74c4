"""Liveness probes of a worker's host, while a call waits for the worker's next bytes.

A connection to a host without power or network stays silent for ever, like one to a busy worker. So after a short
silence the host is probed: its kernel answers a new connection whatever its processes do, so that a slow or stuck
worker is never taken for a lost one. Only silent hosts are probed, and less and less often.
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
"""Silence before the first probe: a few tokens of a stream, many round trips of a link."""
MAX_PROBE_INTERVAL_S = 10.0
"""Longest interval of probes. The backlog of a worker that does not accept holds 256 unused connections."""
PROBES = 3
PROBE_EVERY_S = 0.27
"""Interval of probes: a packet or two may be lost, and a host is known to be gone a second after it went silent."""
_UNREACHED = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT))

Value = TypeVar("Value")


class HostLiveness:
    """Probes the worker's host for one attempt. Costs a timer, and a task only while the worker is silent."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is `host:port`. A host given by name is not probed, because the lookup takes time."""
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._since_s: float | None = None
        """Start of the present wait for its bytes."""
        self._lost = False
        self._slow = False
        self._probing: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(SILENT_S, self._check)

    async def wait(self, awaited: Awaitable[Value]) -> Value:
        """Awaits bytes from the worker. Errors: HostSilent; and those of `awaited`."""
        self._since_s = self._loop.time()
        if self._slow:
            self._check_in(SILENT_S)
        try:
            return await awaited
        except asyncio.CancelledError:
            # Unless the task was cancelled by something else as well.
            if self._lost and self._task is not None and self._task.uncancel() <= self._cancelling:
                raise HostSilent from None
            raise
        finally:
            self._since_s = None

    def close(self) -> None:
        self._timer.cancel()
        if self._probing is not None:
            self._probing.cancel()

    def _check_in(self, wait_s: float) -> None:
        self._slow = wait_s > SILENT_S
        self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._check)

    def _check(self) -> None:
        silent_s = self._loop.time() - self._since_s if self._since_s is not None else 0.0
        if silent_s < SILENT_S:
            self._check_in(SILENT_S - silent_s)
        elif self._probing is None:
            self._probing = self._loop.create_task(self._probe_host(self._since_s))

    async def _probe_host(self, since_s: float | None) -> None:
        address = numeric_address(self._endpoint)
        answers = address is None or await responds(address)
        self._probing = None
        if answers or self._since_s != since_s:
            silent_s = self._loop.time() - self._since_s if self._since_s is not None else 0.0
            self._check_in(min(max(silent_s, SILENT_S), MAX_PROBE_INTERVAL_S))
        elif self._task is not None:
            self._lost = True
            self._task.cancel()


Address = tuple[socket.AddressFamily, tuple[str, int]]


def numeric_address(endpoint: str) -> Address | None:
    """The address of an endpoint; None if its host is a name."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    family, _, _, _, where = found[0]
    return family, (str(where[0]), int(where[1]))


async def responds(address: Address) -> bool:
    """True if the host answers one of a few probes. Takes a moment even then; no call waits for it.

    The answers are in the sockets, however late this process looks: a busy gateway blames no host.
    """
    probes: list[socket.socket] = []
    try:
        for _ in range(PROBES):
            try:
                probes += _probe(*address)
            except OSError:
                return True  # no descriptors, no ports: that says nothing of the host
            await asyncio.sleep(PROBE_EVERY_S)
            if any(map(_responded, probes)):
                return True
        return False
    finally:
        for probe in probes:
            probe.close()


def _probe(family: socket.AddressFamily, where: tuple[str, int]) -> list[socket.socket]:
    """Starts a connection; none if there is no route at the moment."""
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    code = probe.connect_ex(where)
    if code in (0, errno.EINPROGRESS):
        return [probe]
    probe.close()
    if code in _UNREACHED:
        return []
    raise OSError(code, os.strerror(code))


def _responded(probe: socket.socket) -> bool:
    """True if the host has answered: a refused connection is an answer, too."""
    poll = select.poll()
    poll.register(probe, select.POLLOUT)
    return bool(poll.poll(0)) and probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _UNREACHED
