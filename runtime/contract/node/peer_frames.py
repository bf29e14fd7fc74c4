"""Frames of a connection between peers, for ends in Python, as inside TLS: the same as native/src/transport/frames.hpp,
which says what each field means. The reader sends requests, the holder answers each of them once, in any order.

Errors are ValueError: the end that receives something else closes the connection.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal, get_args

REQUEST_BYTES: Final = 40
ANSWER_BYTES: Final = 24
VERSION: Final = 1
MAX_OUTSTANDING: Final = 64
"""A reader has no more requests without an answer: 3 KiB, which fit into any socket's buffer."""
MAX_REQUEST_BYTES: Final = 64 << 20
MAX_WAIT_MS: Final = 600_000

Status = Literal["ok", "not_ready", "gone", "refused"]

_REQUEST: Final = struct.Struct("<4sHHQQQII")
_ANSWER: Final = struct.Struct("<4sHHQQ")
_REQUEST_MAGIC, _ANSWER_MAGIC = b"FSPQ", b"FSPA"
_READ, _RECEIVED, _LEAVE = 1, 2, 3
_STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A range of the checkpoint's region that the reader asks for."""

    request: int
    offset: int
    size_bytes: int
    wait_ms: int = 0
    outstanding: int = 0
    """How many requests before this one have not been answered whole."""

    def encode(self) -> bytes:
        fields = (self.request, self.offset, self.size_bytes, self.wait_ms, self.outstanding)
        return _REQUEST.pack(_REQUEST_MAGIC, VERSION, _READ, *fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The number of answers that have not arrived whole; the reader sends it when there are none."""

    outstanding: int = 0
    leaves: bool = False
    """The reader gives the connection back to the handshake, for its next grant."""

    def encode(self) -> bytes:
        kind = _LEAVE if self.leaves else _RECEIVED
        return _REQUEST.pack(_REQUEST_MAGIC, VERSION, kind, 0, 0, 0, 0, self.outstanding)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHeader:
    """An answer's header. `size_bytes` of the range follow it; none unless it is ok."""

    request: int
    status: Status
    size_bytes: int = 0

    def encode(self) -> bytes:
        return _ANSWER.pack(_ANSWER_MAGIC, VERSION, _STATUSES.index(self.status), self.request, self.size_bytes)


def decode_request(frame: bytes) -> ReadRequest | Received:
    """A frame of REQUEST_BYTES."""
    if len(frame) != REQUEST_BYTES:
        raise ValueError(f"a request has {REQUEST_BYTES} bytes, not {len(frame)}")
    magic, version, kind, request, offset, size_bytes, wait_ms, outstanding = _REQUEST.unpack(frame)
    if (magic, version) != (_REQUEST_MAGIC, VERSION):
        raise ValueError(f"the reader sent no request of version {VERSION}")
    if kind in (_RECEIVED, _LEAVE):
        return Received(outstanding=outstanding, leaves=kind == _LEAVE)
    if kind != _READ or wait_ms > MAX_WAIT_MS or not 1 <= size_bytes <= MAX_REQUEST_BYTES:
        raise ValueError(
            f"the reader's request {request} is none: kind {kind}, {size_bytes} bytes, a wait of {wait_ms} ms"
        )
    return ReadRequest(request=request, offset=offset, size_bytes=size_bytes, wait_ms=wait_ms, outstanding=outstanding)


def decode_answer(header: bytes) -> AnswerHeader:
    """A header of ANSWER_BYTES. Its request may not be outstanding, or have been for another size: the caller knows."""
    if len(header) != ANSWER_BYTES:
        raise ValueError(f"an answer's header has {ANSWER_BYTES} bytes, not {len(header)}")
    magic, version, status, request, size_bytes = _ANSWER.unpack(header)
    if (magic, version) != (_ANSWER_MAGIC, VERSION):
        raise ValueError(f"the peer sent no answer of version {VERSION}")
    if status >= len(_STATUSES):
        raise ValueError(f"the peer's answer to request {request} has the status {status}")
    if (size_bytes > 0) != (_STATUSES[status] == "ok"):
        raise ValueError(f"the peer's answer to request {request} is {_STATUSES[status]} with {size_bytes} bytes")
    return AnswerHeader(request=request, status=_STATUSES[status], size_bytes=size_bytes)
