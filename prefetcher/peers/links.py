"""Connections between nodes, plain or encrypted, with deadlines for what is sent and received.

The native transport takes over a plain connection by its descriptor. The bytes of TLS pass through Python, and so do
those that are received at a measured pace: straight into the segment, hashed on the way. Either link is used by one
thread at a time; `abort` may come from any other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from typing import Protocol

from fleetstart import native

Buffer = bytes | memoryview

POLL_S = 0.1
"""Interval at which a blocked call returns, so that its caller looks whether it shall end."""
SLICE_BYTES = 256 * 1024
"""Bytes given to TLS at once, so that a deadline is noticed between two."""
KEEPALIVE_S = 1
KEEPALIVES = 3
"""Keepalives, one a second, that stay unacknowledged before the other host counts as gone."""
ESTIMATING, FILLING = b"bbr", b"cubic"
"""Congestion control that estimates its rate, and what nodes have instead. In a multicast, who shares a link changes
with each block; BBR keeps the rate of a shared link for a dozen round trips after it has it alone."""


class Link(Protocol):
    """One connection. Errors of all: OSError, which includes TimeoutError at the deadline; EOFError at the end."""

    def receive(self, size_bytes: int, deadline_s: float) -> bytes:
        """Exactly so many bytes."""
        ...

    def fill(self, into: memoryview, checksum: native.Checksum, begin: int, most_bytes: int | None) -> int:
        """Receives a part of `into` from `begin` on and hashes it; returns how far it is filled, which is `begin` if
        nothing came in POLL_S. `most_bytes` limits what is received at once."""
        ...

    def send(self, data: Buffer, deadline_s: float) -> None: ...

    def native_fd(self) -> int | None:
        """The descriptor, which the native transport may use; None if bytes must pass through Python."""
        ...

    def waits(self, timeout_s: float) -> bool:
        """True if there is something to receive, or the end."""
        ...

    def abort(self) -> None:
        """Wakes whoever is blocked on it; both directions end."""
        ...

    def close(self) -> None: ...


class PlainLink:
    """A connection without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        prepare(sock)
        sock.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(POLL_S * 1e6)))
        self._socket = sock

    def receive(self, size_bytes: int, deadline_s: float) -> bytes:
        return _receive(self._socket, size_bytes, deadline_s)

    def fill(self, into: memoryview, checksum: native.Checksum, begin: int, most_bytes: int | None) -> int:
        try:
            if most_bytes is None:
                return checksum.receive(self._socket.fileno(), begin, POLL_S)
            count = self._socket.recv_into(into[begin : begin + most_bytes])
        except (BlockingIOError, TimeoutError):
            return begin
        if not count:
            raise EOFError("the connection was closed")
        checksum.advance(begin + count)
        return begin + count

    def send(self, data: Buffer, deadline_s: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                _check(deadline_s)

    def native_fd(self) -> int | None:
        return self._socket.fileno()

    def waits(self, timeout_s: float) -> bool:
        return _is_readable(self._socket, timeout_s)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TlsLink:
    """A connection with TLS, whose handshake is done."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.settimeout(POLL_S)
        self._socket = sock

    def receive(self, size_bytes: int, deadline_s: float) -> bytes:
        return _receive(self._socket, size_bytes, deadline_s)

    def fill(self, into: memoryview, checksum: native.Checksum, begin: int, most_bytes: int | None) -> int:
        filled, end = begin, min(len(into), begin + (most_bytes or SLICE_BYTES))
        try:
            while filled < end:  # a record has 16 KiB
                count = self._socket.recv_into(into[filled:end])
                if not count:
                    raise EOFError("the connection was closed")
                filled += count
        except TimeoutError:
            pass
        checksum.advance(filled)
        return filled

    def send(self, data: Buffer, deadline_s: float) -> None:
        left = memoryview(data)
        while left:
            with contextlib.suppress(TimeoutError):
                left = left[self._socket.send(left[:SLICE_BYTES]) :]
            if left:
                _check(deadline_s)

    def native_fd(self) -> int | None:
        return None

    def waits(self, timeout_s: float) -> bool:
        return self._socket.pending() > 0 or _is_readable(self._socket, timeout_s)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def prepare(sock: socket.socket) -> None:
    """Sets what each connection between nodes has: no delay, keepalives, by which a dead host is noticed, and
    congestion control that takes what becomes free at once."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES),
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
    with contextlib.suppress(OSError):  # it is no TCP, or the kernel allows none but its own
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(ESTIMATING):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FILLING)


def _receive(sock: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    """All of these bytes. A socket that has none yet says so in one of two ways, with TLS or without."""
    found = bytearray()
    while len(found) < size_bytes:
        try:
            more = sock.recv(size_bytes - len(found))
        except (BlockingIOError, TimeoutError):
            _check(deadline_s)
            continue
        if not more:
            raise EOFError("the connection was closed")
        found += more
        if len(found) < size_bytes:
            _check(deadline_s)
    return bytes(found)


def _check(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise TimeoutError("the deadline has passed")


def _is_readable(sock: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
