"""One message a packet, with descriptors beside it, over a local SOCK_SEQPACKET pair."""

from __future__ import annotations

import os
import socket
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")

PACKET_MAX_BYTES = 192 * 1024
"""Below the kernel's default socket buffer (208 KiB), so that a packet is never refused for its size."""
DESCRIPTORS_MAX = 8


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel(Generic[Received]):
    """Sends any struct, receives those of one union. Not thread-safe; either side may be non-blocking.

    Errors: ChannelClosed when the peer is gone or breaks the protocol: a message that does not decode is
    a broken peer, and a broken peer is treated as a dead one.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self.socket = sock
        self._decoder: msgspec.json.Decoder[Received] = msgspec.json.Decoder(receives)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> None:
        data = msgspec.json.encode(message)
        if len(data) > PACKET_MAX_BYTES:
            raise ValueError(f"message of {len(data)} bytes, {PACKET_MAX_BYTES} at most")
        try:
            socket.send_fds(self.socket, [data], list(descriptors))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> tuple[Received, list[int]]:
        """Blocks if the socket does; BlockingIOError if it does not and nothing is there."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(self.socket, PACKET_MAX_BYTES, DESCRIPTORS_MAX)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("end of file")
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelClosed("a packet was cut")
            return self._decoder.decode(data), descriptors
        except (msgspec.DecodeError, ChannelClosed) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosed(f"a message that is not understood: {error}") from error

    def close(self) -> None:
        self.socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
