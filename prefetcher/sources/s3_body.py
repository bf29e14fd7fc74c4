"""The body of a range response, from the socket into the segment, hashed on the way."""

from __future__ import annotations

import http.client
import socket
import ssl
import struct

from fleetstart import native

from .base import ObjectRange
from .errors import ObjectSizeMismatch, SourceError
from .throttle import BackgroundThrottle

SLICE_S = 0.25
"""Interval at which a read checks the clock and `stopped`."""
READ_BYTES = 256 * 1024
"""Size of a read over TLS, where bytes pass through Python; hashed while they are in the second-level cache."""


class ResponseBody:
    """The body of a response: first the bytes that came with its headers, then, bypassing Python's buffers, the
    socket's.

    Over TLS all bytes pass through Python: the kernel cannot decrypt them.
    """

    def __init__(
        self, answer: http.client.HTTPResponse, sock: socket.socket, stall_s: float, throttle: BackgroundThrottle | None
    ) -> None:
        self._answer = answer
        self._socket = sock
        self._throttle = throttle
        self._encrypted = isinstance(self._socket, ssl.SSLSocket)
        self._left_bytes = answer.length or 0
        self._buffered_bytes = 0
        if not self._encrypted:
            self._buffered_bytes = min(len(answer.peek()), self._left_bytes)
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *_timeval(stall_s)))

    def read(self, into: memoryview, checksum: native.Checksum, begin: int) -> int:
        """Fills `into` from `begin` on; returns how far it is filled, which may be short of the end."""
        most_bytes = READ_BYTES if self._throttle is None else self._throttle.portion_bytes
        if self._encrypted:
            room = into[begin : begin + most_bytes]
            count = self._answer.readinto(room)
            if count < len(room):
                raise EOFError
            filled = begin + count
            checksum.advance(filled)
        elif self._buffered_bytes:
            filled = begin + self._answer.readinto(into[begin : begin + self._buffered_bytes])
            self._buffered_bytes -= filled - begin
            checksum.advance(filled)
        elif self._throttle is not None:
            filled = begin + self._receive(into[begin : begin + most_bytes])
            checksum.advance(filled)
        else:
            filled = checksum.receive(self._socket.fileno(), begin, SLICE_S)
        self._left_bytes -= filled - begin
        return filled

    def _receive(self, room: memoryview) -> int:
        try:
            count = self._socket.recv_into(room)
        except BlockingIOError as error:  # SO_RCVTIMEO
            raise TimeoutError from error
        if not count:
            raise EOFError
        return count

    def end(self) -> bool:
        """True if the connection can be reused."""
        reusable = self._left_bytes == 0 and not self._answer.will_close
        self._answer.close()
        return reusable


def _timeval(seconds: float) -> tuple[int, int]:
    """The kernel's struct timeval."""
    return int(seconds), int(seconds % 1 * 1e6)


class RangeProgress:
    """Progress of one range. `offset` is the next byte of the object."""

    def __init__(self, asked: ObjectRange) -> None:
        self._pieces = iter(asked.pieces)
        self.offset = asked.offset
        self.end = asked.offset + sum(piece.size_bytes for piece in asked.pieces)
        self._into = memoryview(b"")
        self._filled = 0
        self._begin_piece()

    @property
    def whole(self) -> bool:
        return self.offset == self.end

    def fill(self, body: ResponseBody) -> int | None:
        """Reads some more bytes. The piece's xxh3, if it is complete. Errors: EOFError, TimeoutError, OSError."""
        filled = body.read(self._into, self._checksum, self._filled)
        self.offset += filled - self._filled
        self._filled = filled
        if self._filled < len(self._into):
            return None
        checksum = self._checksum.digest()
        if not self.whole:
            self._begin_piece()
        return checksum

    def _begin_piece(self) -> None:
        self._into = next(self._pieces).into
        self._filled = 0
        self._checksum = native.Checksum(self._into)


def check_range(asked: ObjectRange, progress: RangeProgress, answer: http.client.HTTPResponse) -> None:
    """Checks that the response has the requested bytes. Errors: ObjectSizeMismatch if the object has another size,
    SourceError."""
    span, _, total = answer.headers.get("Content-Range", "").partition("/")
    if total.isdecimal() and int(total) != asked.object_bytes:
        raise ObjectSizeMismatch(asked.key, expected_bytes=asked.object_bytes, found_bytes=int(total))
    expected = f"bytes {progress.offset}-{progress.end - 1}"
    length = answer.headers.get("Content-Length", "")
    if span != expected or length != str(progress.end - progress.offset):
        raise SourceError(f"{asked.key}: {span or 'no range'} in {length or 'unknown many'} bytes came for {expected}")
