"""The stream between a worker that may write volumes and its node: messages, and files with their bytes.

One connected pair of sockets for the worker's life. The worker asks (`Commit` and its files, `Reload`), the node
answers each with `Done`; before the `Done` of a reload come the files. Either side may end a transfer early: the
sender with `Abort`, the receiver with its `Done`, which the sender sees before its next block.

What comes from a worker is untrusted. Files are named by path and size only, so that no link and no device can be
expressed, and `receive_files` refuses every path that could lead out of the folder, and more bytes than were announced.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..decoding import UNDECODABLE
from ..errors import ErrorInfo, FleetError, InvalidInput, TooLarge
from ..function.layer import FILES_MAX, LAYER_MAX_BYTES, LayerFile, check_path
from ..sizes import MIB

BLOCK_BYTES = MIB
MESSAGE_MAX_BYTES = 64 * 1024
FILE_MESSAGE_BYTES = 1024
"""Counted for a message of a refused transfer."""
REFUSED_MAX_BYTES = 64 * MIB
"""What may still come of a transfer that was refused: the sender looks for the answer before each block."""
_HEAD = struct.Struct(">cI")
_MESSAGE, _DATA = b"m", b"d"


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Makes a new version out of the files that follow."""

    volume: str
    files: int
    size_bytes: int


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Asks for the files of the newest version; there are none to send if the worker has it."""

    volume: str
    again: bool = False
    """Asks for those of the version that the node takes for the worker's instead: the worker has lost them."""


class Incoming(msgspec.Struct, frozen=True, tag="incoming"):
    """Announces the files of a reload."""

    files: int
    size_bytes: int


class FileHead(msgspec.Struct, frozen=True, tag="file"):
    """A file, whose bytes follow."""

    path: str
    size_bytes: int
    executable: bool = False


class End(msgspec.Struct, frozen=True, tag="end"):
    """All files were sent."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The sender gives up. Nothing is changed."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The node's answer."""

    version: int = 0
    error: ErrorInfo | None = None


Message = Commit | Reload | Incoming | FileHead | End | Abort | Done


class StreamClosed(Exception):
    """The other side is gone, or has broken the protocol."""


class TransferAborted(Exception):
    """The sender has given up."""


class VolumeStream:
    """One end of the stream. Blocking; used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.socket = sock
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)

    def send(self, message: Message) -> None:
        """Errors: StreamClosed."""
        self._send(_MESSAGE, msgspec.json.encode(message))

    def send_data(self, block: bytes) -> None:
        self._send(_DATA, block)

    def _send(self, kind: bytes, data: bytes) -> None:
        try:
            self.socket.sendall(_HEAD.pack(kind, len(data)) + data)
        except OSError as error:
            raise StreamClosed(str(error)) from error

    def receive(self) -> Message | bytes:
        """A message, or a block of a file. Errors: StreamClosed."""
        kind, size_bytes = _HEAD.unpack(self._exactly(_HEAD.size))
        most = {_MESSAGE: MESSAGE_MAX_BYTES, _DATA: BLOCK_BYTES}.get(kind, -1)
        if size_bytes > most:
            raise StreamClosed(f"a frame {kind!r} of {size_bytes} bytes")
        data = self._exactly(size_bytes)
        if kind == _DATA:
            return data
        try:
            return self._decoder.decode(data)
        except UNDECODABLE as error:
            raise StreamClosed(f"a message that is not understood: {error}") from error

    def answered(self) -> bool:
        """Checks whether something can be received already."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _exactly(self, size_bytes: int) -> bytes:
        found = bytearray(size_bytes)
        view = memoryview(found)
        while view:
            try:
                count = self.socket.recv_into(view)
            except OSError as error:
                raise StreamClosed(str(error)) from error
            if not count:
                raise StreamClosed("end of file")
            view = view[count:]
        return bytes(found)

    def close(self) -> None:
        """Ends the stream, also for a thread that waits in it."""
        with contextlib.suppress(OSError):  # the other side is gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def send_files(
    stream: VolumeStream,
    folder: Path,
    files: Sequence[LayerFile],
    stop: Callable[[], bool] = lambda: False,
    sent: Callable[[LayerFile, bytes], None] = lambda file, block: None,
    opener: Callable[[str, int], int] | None = None,
) -> None:
    """Sends files, then `End`; `Abort` if a file has become shorter, and once `stop` says so. `sent` is given each
    block after it was sent; `opener` opens a file in place of `os.open`.

    Errors: StreamClosed, OSError, InvalidInput.
    """
    try:
        for file in files:
            if stop():
                stream.send(Abort())
                return
            stream.send(FileHead(file.path, file.size_bytes, file.executable))
            left = file.size_bytes
            with open(folder / file.path, "rb", opener=opener) as opened:
                while left and (block := opened.read(min(BLOCK_BYTES, left))):
                    if stop():
                        stream.send(Abort())
                        return
                    stream.send_data(block)
                    sent(file, block)
                    left -= len(block)
            if left:
                raise InvalidInput(f"{file.path} became {left:,} bytes shorter while it was sent")
    except (OSError, FleetError):
        stream.send(Abort())
        raise
    stream.send(End())


def check_announced(files: int, size_bytes: int) -> None:
    """Errors: TooLarge, InvalidInput."""
    if not (files >= 0 and size_bytes >= 0):
        raise InvalidInput(f"{files} files of {size_bytes} bytes cannot be")
    if files > FILES_MAX:
        raise TooLarge(f"{files:,} files, and a version of a volume has {FILES_MAX:,} at most")
    if size_bytes > LAYER_MAX_BYTES:
        raise TooLarge(f"{size_bytes:,} bytes, and a version of a volume has {LAYER_MAX_BYTES:,} at most")


def receive_files(stream: VolumeStream, folder: Path, files: int, size_bytes: int) -> list[LayerFile]:
    """Receives announced files into an empty folder, which nobody else writes, up to `End`. Returns them in order.

    Errors: TransferAborted, StreamClosed; InvalidInput, TooLarge for what is not allowed, after which more may come;
    OSError.
    """
    found: list[LayerFile] = []
    left_bytes = size_bytes
    while not isinstance(message := stream.receive(), End):
        if isinstance(message, Abort):
            raise TransferAborted
        if not isinstance(message, FileHead):
            raise StreamClosed("a file was expected")
        left_bytes -= message.size_bytes
        _check(message, found[-1] if found else None)
        if left_bytes < 0 or len(found) == files:
            raise TooLarge(f"more came than the {files:,} files with {size_bytes:,} bytes that were announced")
        _receive_file(stream, folder, message)
        found.append(LayerFile(message.path, message.size_bytes, message.executable))
    return found


def _check(file: FileHead, former: LayerFile | None) -> None:
    check_path(file.path)
    if file.size_bytes < 0:
        raise InvalidInput(f"file {file.path[:200]!r} has {file.size_bytes} bytes")
    if former is not None:
        before, path = former.path.split("/"), file.path.split("/")
        if before >= path or path[: len(before)] == before:
            raise InvalidInput(f"file {file.path[:200]!r} is out of order, named twice, or below a file")


def _receive_file(stream: VolumeStream, folder: Path, file: FileHead) -> None:
    path = folder / file.path
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o755 if file.executable else 0o644), "wb") as opened:
        left = file.size_bytes
        while left:
            block = stream.receive()
            if isinstance(block, Abort):
                raise TransferAborted
            if not isinstance(block, bytes) or not 0 < len(block) <= left:
                raise StreamClosed(f"{left} bytes of {file.path[:200]!r} were expected")
            opened.write(block)
            left -= len(block)


def discard_files(stream: VolumeStream, most_bytes: int = REFUSED_MAX_BYTES) -> None:
    """Drops the rest of a transfer that was refused, up to its end. Errors: StreamClosed, also if it does not end."""
    while not isinstance(message := stream.receive(), End | Abort):
        most_bytes -= len(message) if isinstance(message, bytes) else FILE_MESSAGE_BYTES
        if most_bytes < 0:
            raise StreamClosed("a refused transfer goes on")
