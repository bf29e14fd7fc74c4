"""What stages say to each other: a small message, and numbers behind it as they lie in memory.

A frame is twelve bytes of head (magic, version, sizes), the message in MessagePack, then the payload. Whoever sends
something else, or more than a stage can ever need, is no stage.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from ..contract.errors import ErrorInfo
from ..contract.ids import PipelineId

HEAD = struct.Struct("<2sHII")
MAGIC, FORMAT = b"fs", 1
MESSAGE_MAX_BYTES = 8 << 20
"""Block tables of a few thousand rows."""
PAYLOAD_MAX_BYTES = 256 << 20
"""Hidden states of the largest step: 4,096 rows of 16,384 numbers."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First on each link: who sends on it, and the proof that it may."""

    pipeline: PipelineId
    stage: int
    secret: str
    relayed: bool = False
    """What follows comes through the object store, and later than over a connection."""


class StageLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The sender's layers are there."""


class StageStep(msgspec.Struct, frozen=True, tag="step"):
    """Rows for the next stage's layers, as in a `Batch`. Payload: hidden states [rows, hidden_size]."""

    number: int
    positions: list[int]
    starts: list[int]
    tables: list[list[int]]
    logits_rows: list[int]


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """From the last stage to the first. Payload: hidden states of the rows whose logits are wanted."""

    number: int


class KvRequest(msgspec.Struct, frozen=True, tag="kv_wanted"):
    """Keys and values of tokens `[begin, end)` of a sequence whose blocks these are, of all layers of the stage."""

    number: int
    table: list[int]
    begin: int
    end: int


class KvData(msgspec.Struct, frozen=True, tag="kv"):
    """Payload: as of a decoder's `read_kv`."""

    number: int


class StageBroken(msgspec.Struct, frozen=True, tag="broken"):
    """The sender cannot go on as a stage, or lost the link to another one."""

    why: str


class Dismiss(msgspec.Struct, frozen=True, tag="farewell"):
    """The first stage needs the others no longer: the end of its links is no loss."""


class Promoted(msgspec.Struct, frozen=True, tag="grown"):
    """The sender has the whole model, and room for requests that run elsewhere beside those of its own."""

    running: int


class MigrationOffer(msgspec.Struct, frozen=True, tag="lend"):
    """A request that shall go on at the receiver: it computes these tokens while the sender goes on with it."""

    number: int
    tokens: list[int]
    prompt_count: int
    max_new_tokens: int
    sampling: dict[str, float | int | None]


class MigrationCaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    number: int


class MigrationHandover(msgspec.Struct, frozen=True, tag="begin"):
    """All its tokens by now. The sender has stopped: the next token is the receiver's."""

    number: int
    tokens: list[int]


class MigratedToken(msgspec.Struct, frozen=True, tag="token"):
    """The next one of a request that was lent."""

    number: int
    token: int


class MigrationAborted(msgspec.Struct, frozen=True, tag="give_back"):
    """It is no longer wanted, or, from the receiver, cannot go on there."""

    number: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Still there."""


class ArrayForm(msgspec.Struct, frozen=True):
    """One array: dtype by its safetensors name, and whose it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    library: Literal["torch", "numpy"]


class Activations(msgspec.Struct, frozen=True, tag="activations"):
    """Of one call of a model in layers: for the next stage, or, from the last to the first, what the layers gave.
    Payload: the arrays, each from a multiple of ALIGNMENT_BYTES on."""

    number: int
    arrays: list[ArrayForm]
    single: bool
    """One array, and not a dict of one."""


class LayerCallFailed(msgspec.Struct, frozen=True, tag="call_failed"):
    """To the first stage: a layer of the sender refused that call's activations."""

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
    """The other end is gone, or talks nonsense."""


def send_frame(link: socket.socket, message: Message, payload: Buffer = b"") -> None:
    """Errors: LinkBroken. For one thread at a time."""
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
    """The next frame. Errors: LinkBroken; also after the socket's timeout without a byte."""
    magic, version, body_bytes, payload_bytes = HEAD.unpack(_exactly(link, HEAD.size))
    if magic != MAGIC or version != FORMAT or body_bytes > MESSAGE_MAX_BYTES or payload_bytes > PAYLOAD_MAX_BYTES:
        raise LinkBroken("not a frame of this format")
    try:
        message = _decoder.decode(_exactly(link, body_bytes))
    except msgspec.DecodeError as error:
        raise LinkBroken(f"a message that is not understood: {error}") from error
    return message, _exactly(link, payload_bytes)


def _exactly(link: socket.socket, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    view, done = memoryview(data), 0
    while done < size_bytes:
        try:
            count = link.recv_into(view[done:])
        except TimeoutError as error:
            raise LinkBroken("silent for too long") from error
        except OSError as error:
            raise LinkBroken(str(error) or type(error).__name__) from error
        if count == 0:
            raise LinkBroken("closed by the other end")
        done += count
    return data
