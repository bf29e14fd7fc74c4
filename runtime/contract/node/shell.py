"""The protocol of `fs shell`, between the command line and a shell worker (`WorkerOrder.shell`).

A WebSocket, whose text frames are these messages and whose binary frames are bytes: from the client what is typed, from
the worker what is printed, behind one byte that says whether to stdout or to stderr (a terminal has stdout alone). The
first frame is `Start`, the last one `Exit`. The controller in between passes frames on, once it has checked them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

FRAME_MAX_BYTES = 64 * 1024
"""Maximum size of a frame, text or binary, from either side."""
CHUNK_BYTES = 32 * 1024
"""Bytes sent in one frame."""
STDOUT, STDERR = b"\x01", b"\x02"
IDLE_S = 900.0
"""A session in which nothing is typed and nothing printed for so long ends, unless its client asks for another time."""
IDLE_MOST_S = 24 * 3600.0

Cells = Annotated[int, Meta(ge=1, le=4096)]


class Size(msgspec.Struct, frozen=True, tag="size", forbid_unknown_fields=True):
    """Size of the client's window, in characters."""

    rows: Cells
    columns: Cells


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True, forbid_unknown_fields=True):
    argv: Annotated[list[Annotated[str, Meta(max_length=32 * 1024)]], Meta(max_length=1024)] = []
    """Empty: a shell."""
    window: Size | None = None
    """Size of the terminal; None: three pipes and no terminal."""
    term: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\Z")] = "dumb"
    """Kind of the client's terminal, as in TERM."""


class EndOfInput(msgspec.Struct, frozen=True, tag="end", forbid_unknown_fields=True):
    """The client's standard input has ended."""


class Exit(msgspec.Struct, frozen=True, tag="exit", forbid_unknown_fields=True):
    status: Annotated[int, Meta(ge=0, le=255)]
    """Exit status as in a shell: 128 plus the signal's number, 127 if the command was not found."""


FromClient = Start | Size | EndOfInput


def read_client(text: str) -> FromClient:
    """Decodes a text frame of the client. Errors: msgspec.DecodeError."""
    return _FROM_CLIENT.decode(text.encode("utf-8", "surrogatepass"))


def read_exit(text: str) -> Exit:
    """Decodes the last frame of the worker. Errors: msgspec.DecodeError."""
    return _EXIT.decode(text)


_FROM_CLIENT: msgspec.json.Decoder[FromClient] = msgspec.json.Decoder(FromClient)
_EXIT = msgspec.json.Decoder(Exit)
