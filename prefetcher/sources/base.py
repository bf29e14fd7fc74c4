"""The source protocol, its errors, and the local folder as a source (S3 is in `s3`).

A source reads and reports errors; it does not retry and knows nothing of checkpoints. Its reads block and release
the GIL: they belong in threads. Peers will be one more source.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleetstart import native
from fleetstart.runtime.contract.object_keys import is_key

from .throttle import BackgroundThrottle

PAGE_BYTES = 4096
"""Alignment of direct reads: offset, address and length."""
DISK_THREADS = 16
"""Eight read at once or verify what they have read: on the machine measured 16 reach the rate of fio, 8 stay 5%
below it."""
FILE_RUN_BYTES = 4 * 1024 * 1024
"""Size of one direct read: smaller ones cost more, and longer ones would read far ahead of what is used first."""
MAX_PIECES = 1024
"""Buffers of one read: IOV_MAX."""


class SourceError(Exception):
    """The store failed or answered wrongly; a retry may help."""


class ObjectMissing(Exception):
    """The store has no such object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is not in the store")
        self.key = key


class ObjectSizeMismatch(Exception):
    """The object's size differs from its manifest: it was truncated or replaced."""

    def __init__(self, key: str, *, expected_bytes: int, found_bytes: int) -> None:
        super().__init__(f"{key} has {found_bytes} bytes, {expected_bytes} expected")
        self.key = key
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes


class ReadCancelled(Exception):
    """The reader was told to stop."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The buffer for the next `size_bytes` of an object: `room`, a multiple of PAGE_BYTES if possible, whose rest
    stays zero."""

    size_bytes: int
    room: memoryview

    @property
    def into(self) -> memoryview:
        return self.room[: self.size_bytes]


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """A range of an object of `object_bytes`, from `offset` on, read into consecutive pieces."""

    key: str
    object_bytes: int
    offset: int
    pieces: Sequence[Piece]
    throttle: BackgroundThrottle | None = None
    """Set for background reads."""


class Source(Protocol):
    """A store of objects. Thread-safe. Keys are relative, `/`-separated.

    Errors of both reads: ObjectMissing, SourceError; of a range also ObjectSizeMismatch and ReadCancelled.
    """

    run_bytes: int
    """Largest range worth requesting at once."""
    threads: int
    """Threads that saturate it; 0 if that depends on the network, and the node's setting decides."""

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        """A small object, whole. ValueError if it is larger than the limit, before it is read."""
        ...

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        """Fills the pieces in order and yields the xxh3 of each once it is complete."""
        ...


class FileReader:
    """Reads pieces of one file: by direct I/O where possible, unless the page cache has them.

    Thread-safe; the descriptor belongs to the caller. Errors of reads: OSError, EOFError.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            self._direct: int | None = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without direct I/O
            self._direct = None

    def read(self, offset: int, piece: Piece) -> int:
        """Fills the piece; returns its xxh3."""
        aligned = offset % PAGE_BYTES == 0 and len(piece.room) % PAGE_BYTES == 0
        if not aligned or self._direct is None or self._is_cached(offset, piece.size_bytes):
            return native.read_checksum(self._fd, offset, piece.into)
        try:
            return native.read_direct(self._direct, offset, piece.room, piece.size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # blocks larger than pages, or memory that the device cannot reach
                raise
            return native.read_checksum(self._fd, offset, piece.into)

    def read_run(self, offset: int, pieces: Sequence[Piece]) -> Iterator[int]:
        """Fills consecutive pieces, by one read if possible; yields the xxh3 of each."""
        there_bytes = self._read_together(offset, pieces)
        for piece in pieces:
            if there_bytes >= piece.size_bytes:
                piece.room[piece.size_bytes :] = bytes(len(piece.room) - piece.size_bytes)
                yield native.xxh3(piece.into)
            else:
                yield self.read(offset, piece)
            offset += piece.size_bytes
            there_bytes -= piece.size_bytes

    def _read_together(self, offset: int, pieces: Sequence[Piece]) -> int:
        """Bytes read by one direct read: 0 where it is not possible, fewer than requested at the end of a file."""
        size_bytes = sum(piece.size_bytes for piece in pieces)
        aligned = offset % PAGE_BYTES == 0 and all(len(piece.room) % PAGE_BYTES == 0 for piece in pieces)
        gapless = all(len(piece.room) == piece.size_bytes for piece in pieces[:-1])
        if self._direct is None or not 1 < len(pieces) <= MAX_PIECES or not (aligned and gapless):
            return 0
        if self._is_cached(offset, size_bytes):
            return 0
        try:
            return os.preadv(self._direct, [piece.room for piece in pieces], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def _is_cached(self, offset: int, size_bytes: int) -> bool:
        return native.cached_bytes(self._fd, offset, size_bytes) >= size_bytes


def check_key(key: str) -> str:
    """Rejects keys that would leave the store: they hold ids from outside. Errors: ObjectMissing."""
    if not is_key(key):
        raise ObjectMissing(key)
    return key


class FileSource:
    """A folder, laid out like a bucket."""

    run_bytes = FILE_RUN_BYTES
    threads = DISK_THREADS

    def __init__(self, root: Path) -> None:
        self._root = root

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        fd = self._open(key)
        try:
            size = os.fstat(fd).st_size
            if size > limit_bytes:
                raise ValueError(f"{key} has {size} bytes, {limit_bytes} at most")
            with os.fdopen(os.dup(fd), "rb") as file:
                return file.read()
        except OSError as error:
            raise SourceError(f"{key}: {error}") from error
        finally:
            os.close(fd)

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        fd = self._open(asked.key)
        reader = FileReader(fd)
        try:
            found_bytes = os.fstat(fd).st_size
            if found_bytes != asked.object_bytes:
                raise ObjectSizeMismatch(asked.key, expected_bytes=asked.object_bytes, found_bytes=found_bytes)
            if asked.throttle is not None:
                asked.throttle.wait(sum(piece.size_bytes for piece in asked.pieces), stopped)
            if stopped():
                raise ReadCancelled(asked.key)
            yield from reader.read_run(asked.offset, asked.pieces)
        except EOFError as error:
            found_bytes = os.fstat(fd).st_size
            raise ObjectSizeMismatch(asked.key, expected_bytes=asked.object_bytes, found_bytes=found_bytes) from error
        except OSError as error:
            raise SourceError(f"{asked.key}: {error}") from error
        finally:
            reader.close()
            os.close(fd)

    def _open(self, key: str) -> int:
        try:
            return os.open(self._root / check_key(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(key) from error
        except OSError as error:
            raise SourceError(f"{key}: {error}") from error
