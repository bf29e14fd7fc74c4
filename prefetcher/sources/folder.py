"""A local folder as a source: direct reads of its files, checksummed as they are read.

The disk cache reads its files by the same `FileReader`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fleetstart import native

from .base import PAGE_BYTES, ObjectRange, Piece, check_key
from .errors import ObjectMissing, ObjectSizeMismatch, ReadCancelled, SourceError

DISK_THREADS = 16
"""Eight read at once or verify what they have read: on the machine measured 16 reach the rate of fio, 8 stay 5%
below it."""
FILE_RUN_BYTES = 4 * 1024 * 1024
"""Size of one direct read: smaller ones cost more, and longer ones would read far ahead of what is used first."""
MAX_PIECES = 1024
"""Buffers of one read: IOV_MAX."""


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


class FolderSource:
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
