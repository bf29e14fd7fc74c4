"""Where bytes come from: one short protocol, and the local folder behind it (S3 is in `s3`).

A source reads and says plainly what went wrong; it does not retry and knows nothing of checkpoints.
Its reads block and release the GIL: they belong in threads. Peers will be one more source.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fleetstart import native


class SourceError(Exception):
    """The store did not answer as it must; trying again may help."""


class ObjectMissing(Exception):
    """The store answered: there is no such object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is not in the store")
        self.key = key


class ObjectShort(Exception):
    """The object ends before the range that was asked for."""

    def __init__(self, key: str, *, expected_bytes: int, found_bytes: int) -> None:
        super().__init__(f"{key} has {found_bytes} bytes, at least {expected_bytes} expected")
        self.key = key
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes


class Abandoned(Exception):
    """The reader was told to stop; nobody waits for these bytes any more."""


class Source(Protocol):
    """Thread-safe. Keys are relative, `/`-separated.

    Errors of both reads: ObjectMissing, SourceError; of a range also ObjectShort and Abandoned.
    """

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        """A small object, whole. ValueError if it is larger than the limit, before it is read."""
        ...

    def read_range(self, key: str, offset: int, into: memoryview, stopped: Callable[[], bool]) -> int:
        """Fills `into` with the object's bytes from `offset` and returns their xxh64."""
        ...


def check_key(key: str) -> str:
    """Keys hold ids that came from outside: none may lead out of the store. ObjectMissing."""
    if not key or key.startswith("/") or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ObjectMissing(key)
    return key


class FileSource:
    """A folder, laid out like a bucket."""

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

    def read_range(self, key: str, offset: int, into: memoryview, stopped: Callable[[], bool]) -> int:
        if stopped():
            raise Abandoned(key)
        fd = self._open(key)
        try:
            return native.read_checksum(fd, offset, into)
        except EOFError as error:
            found = os.fstat(fd).st_size
            raise ObjectShort(key, expected_bytes=offset + len(into), found_bytes=found) from error
        except OSError as error:
            raise SourceError(f"{key}: {error}") from error
        finally:
            os.close(fd)

    def _open(self, key: str) -> int:
        try:
            return os.open(self._root / check_key(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(key) from error
        except OSError as error:
            raise SourceError(f"{key}: {error}") from error


def open_source(url: str) -> Source:
    """The source that FS_STORE names: a folder, or `s3://bucket/prefix`."""
    if url.startswith("s3://"):
        from fleetstart.prefetcher.s3 import S3Source

        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        return S3Source(bucket=bucket, prefix=prefix.strip("/"))
    return FileSource(Path(url.removeprefix("file://")))
