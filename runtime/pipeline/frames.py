"""Wire format between pipeline stages: frames of one small message and a binary payload.

A frame is twelve bytes of header (magic, version, sizes), the message in MessagePack, then the payload. A link that
sends anything else, or more than a stage can ever need, is closed. Tags are names on the wire: they outlive the names
of classes.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Literal

import msgspec

from ..contract.decoding import UNDECODABLE
from ..contract.errors import ErrorInfo
from ..contract.ids import PipelineId

HEAD = struct.Struct("<2sHII")
MAGIC, FORMAT = b"fs", 1
MESSAGE_MAX_BYTES = 8 << 20
"""Block tables of a few thousand rows."""
PAYLOAD_MAX_BYTES = 256 << 20
"""Hidden states of the largest step: 4,096 rows of 16,384 numbers."""
HELLO_MAX_BYTES = 4096
"""A greeting has an id, a secret and a number. It is all that is read from a stage that is not known yet."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of each link: the sending stage and the pipeline's secret."""

    pipeline: PipelineId
    stage: int
    secret: str
    relayed: bool = False
    """True if the link goes through the object store, with a higher latency than a connection."""


class StageLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The sender has loaded its layers."""


class StageStep(msgspec.Struct, frozen=True, tag="step"):
    """One engine step for the next stage, with the fields of a `Batch`. Payload: hidden states [rows, hidden_size]."""

    number: int
    positions: list[int]
    starts: list[int]
    tables: list[list[int]]
    logits_rows: list[int]


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """Result of a step, from the last stage to the first. Payload: hidden states of `logits_rows`."""

    number: int


class KvRequest(msgspec.Struct, frozen=True, tag="kv_wanted"):
    """Request for the keys and values of tokens `[begin, end)` in the blocks of `table`, of all layers of the stage."""

    number: int
    table: list[int]
    begin: int
    end: int


class KvData(msgspec.Struct, frozen=True, tag="kv"):
    """Answer to a `KvRequest`. Payload: as returned by a decoder's `read_kv`."""

    number: int


class StageBroken(msgspec.Struct, frozen=True, tag="broken"):
    """The sender failed, or lost its link to another stage."""

    why: str


class Dismiss(msgspec.Struct, frozen=True, tag="farewell"):
    """Dismissal of the other stages by the first: the end of its links is not a failure."""


class Promoted(msgspec.Struct, frozen=True, tag="grown"):
    """The sender has the whole model and can take over requests; `running` are its own."""

    running: int


class MigrationOffer(msgspec.Struct, frozen=True, tag="lend"):
    """Offer of a running request: the receiver computes these tokens while the sender continues it."""

    number: int
    tokens: list[int]
    prompt_count: int
    max_new_tokens: int
    sampling: dict[str, float | int | list[tuple[int, float]] | None]


class MigrationCaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    """The receiver has computed all offered tokens."""

    number: int


class MigrationHandover(msgspec.Struct, frozen=True, tag="begin"):
    """Handover of a request with all its tokens. The sender has stopped: the receiver computes the next token."""

    number: int
    tokens: list[int]


class MigratedToken(msgspec.Struct, frozen=True, tag="token"):
    """Next token of a migrated request."""

    number: int
    token: int


class MigrationAborted(msgspec.Struct, frozen=True, tag="give_back"):
    """End of a migration: cancelled by the owner, or refused or lost by the other worker."""

    number: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keep-alive."""


class ArrayForm(msgspec.Struct, frozen=True):
    """Name, dtype (by its safetensors name), shape and library of one array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    library: Literal["torch", "numpy"]


class Activations(msgspec.Struct, frozen=True, tag="activations"):
    """Activations of one call of a layered model, for the next stage or, as its result, for the first.
    Payload: the arrays, each aligned to ALIGNMENT_BYTES."""

    number: int
    arrays: list[ArrayForm]
    single: bool
    """True if the activations are one array instead of a dict."""


class LayerCallFailed(msgspec.Struct, frozen=True, tag="call_failed"):
    """Error of one call, raised by a layer of the sender; for the first stage."""

    number: int
    error: ErrorInfo


MigrationMessage = Promoted | MigrationOffer | MigrationCaughtUp | MigrationHandover | MigratedToken | MigrationAborted
LayerMessage = Activations | LayerCallFailed
Message = (
    Hello
    | StageLoaded
    | StageStep
    | StepResult
    | KvRequest
    | KvData
    | StageBroken
    | Dismiss
    | MigrationMessage
    | LayerMessage
    | Ping
)
Buffer = bytes | bytearray | memoryview

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class LinkBroken(Exception):
    """A link whose other end is gone or violates the protocol."""


def send_frame(link: socket.socket, message: Message, payload: Buffer = b"") -> None:
    """Sends one frame; not thread-safe. Errors: LinkBroken, ValueError for a frame above the limits."""
    body = msgspec.msgpack.encode(message)
    size_bytes = memoryview(payload).nbytes
    if len(body) > MESSAGE_MAX_BYTES or size_bytes > PAYLOAD_MAX_BYTES:
        raise ValueError(f"a frame of {len(body)} and {size_bytes} bytes")
    try:
        link.sendall(HEAD.pack(MAGIC, FORMAT, len(body), size_bytes) + body)
        if size_bytes:
            link.sendall(memoryview(payload).cast("B"))
    except OSError as error:
        raise LinkBroken(str(error) or type(error).__name__) from error


def receive_frame(link: socket.socket) -> tuple[Message, bytearray]:
    """Receives the next frame. Errors: LinkBroken; also after the socket's timeout without a byte."""
    body_bytes, payload_bytes = _head(link, MESSAGE_MAX_BYTES, PAYLOAD_MAX_BYTES)
    return _decoded(_exactly(link, body_bytes)), _exactly(link, payload_bytes)


def receive_hello(link: socket.socket, within_s: float) -> Hello:
    """Receives the greeting of a stage that is not known yet: a small frame without a payload, all of it in time.
    Errors: LinkBroken."""
    ends_s = time.monotonic() + within_s
    body_bytes, _ = _head(link, HELLO_MAX_BYTES, 0, ends_s)
    hello = _decoded(_exactly(link, body_bytes, ends_s))
    if not isinstance(hello, Hello):
        raise LinkBroken(f"begins with a {type(hello).__name__} instead of a greeting")
    return hello


def _head(link: socket.socket, body_max: int, payload_max: int, ends_s: float | None = None) -> tuple[int, int]:
    magic, version, body_bytes, payload_bytes = HEAD.unpack(_exactly(link, HEAD.size, ends_s))
    if magic != MAGIC or version != FORMAT or body_bytes > body_max or payload_bytes > payload_max:
        raise LinkBroken("not a frame of this format")
    return body_bytes, payload_bytes


def _decoded(body: bytearray) -> Message:
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise LinkBroken(f"invalid message: {error}") from error


def _exactly(link: socket.socket, size_bytes: int, ends_s: float | None = None) -> bytearray:
    """Reads so many bytes: until `ends_s`, or else as long as the socket's timeout never passes without one."""
    data = bytearray(size_bytes)
    view, done = memoryview(data), 0
    while done < size_bytes:
        try:
            if ends_s is not None:
                link.settimeout(max(0.001, ends_s - time.monotonic()))
            count = link.recv_into(view[done:])
        except TimeoutError as error:
            raise LinkBroken("silent for too long") from error
        except OSError as error:
            raise LinkBroken(str(error) or type(error).__name__) from error
        if count == 0:
            raise LinkBroken("closed by the other end")
        done += count
    return data
