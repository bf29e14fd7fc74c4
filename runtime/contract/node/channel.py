"""Message channel between processes of a node: one JSON message a packet, with file descriptors, over
SOCK_SEQPACKET."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ..decoding import UNDECODABLE

Received = TypeVar("Received")

PACKET_MAX_BYTES = 192 * 1024
"""Below the kernel's default socket buffer (208 KiB), so that a packet is never refused for its size."""
DESCRIPTORS_MAX = 250
"""Descriptors in one packet; the kernel takes 253. More go ahead of their message, in packets of their own."""
MESSAGE_DESCRIPTORS_MAX = 4096
"""Descriptors with one message: enough for two segments of the largest pool."""
_AHEAD = b"+"
"""A packet that is no JSON: its descriptors belong to the message that follows."""


class ChannelClosed(Exception):
    """The peer is gone, or has broken the protocol."""


class Channel(Generic[Received]):
    """A channel that sends any struct and receives those of one union. Not thread-safe; may be non-blocking.

    Errors: ChannelClosed when the peer is gone or breaks the protocol: a message that does not decode is
    a broken peer, and a broken peer is treated as a dead one.
    """

    def __init__(self, sock: socket.socket, receives: Any, *, descriptors: int = MESSAGE_DESCRIPTORS_MAX) -> None:
        """`descriptors`: the most that come with one message."""
        self.socket = sock
        self._descriptors_max = descriptors
        self._decoder: msgspec.json.Decoder[Received] = msgspec.json.Decoder(receives)
        self._ahead: list[int] = []

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        data = msgspec.json.encode(message)
        if len(data) > PACKET_MAX_BYTES:
            raise ValueError(f"message of {len(data)} bytes, {PACKET_MAX_BYTES} at most")
        try:
            while len(descriptors) > DESCRIPTORS_MAX:
                socket.send_fds(self.socket, [_AHEAD], descriptors[:DESCRIPTORS_MAX])
                descriptors = descriptors[DESCRIPTORS_MAX:]
            socket.send_fds(self.socket, [data], descriptors)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> tuple[Received, list[int]]:
        """Receives a message and its descriptors. BlockingIOError if the socket is non-blocking and none is there."""
        while True:
            before = len(self._ahead)
            data = self._packet()
            if data != _AHEAD:
                break
            if len(self._ahead) == before:
                self._drop_ahead()
                raise ChannelClosed("a packet came ahead of a message, and nothing with it")
        descriptors, self._ahead = self._ahead, []
        try:
            return self._decoder.decode(data), descriptors
        except UNDECODABLE as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosed(f"a message that is not understood: {error}") from error

    def _packet(self) -> bytes:
        """Reads one packet; its descriptors join those that came ahead."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(self.socket, PACKET_MAX_BYTES, DESCRIPTORS_MAX)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        self._ahead += descriptors
        broken = "a packet was cut" if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) else ""
        if len(self._ahead) > self._descriptors_max:
            broken = f"more than {self._descriptors_max} descriptors came"
        if not data or broken:
            self._drop_ahead()
            raise ChannelClosed(broken or "end of file")
        return data

    def _drop_ahead(self) -> None:
        for descriptor in self._ahead:
            os.close(descriptor)
        self._ahead = []

    def close(self) -> None:
        self._drop_ahead()
        self.socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """The address of a unix socket at this path, which may be longer than the 107 bytes of an address. Errors:
    OSError if its folder is not there."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
