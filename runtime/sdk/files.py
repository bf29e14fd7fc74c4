"""Uploaded files of a request: name, content type and content as an open binary file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MEMORY_BYTES = 1024 * 1024
"""Largest content that is kept in memory; more goes to the worker's temporary folder."""
NAME_MAX = 255


class File:
    """An uploaded file: a parameter annotated with it takes a part of a multipart form, or the raw body.

        @function
        def describe(picture: File) -> str:
            return f"{picture.name}: {PIL.Image.open(picture).size}"

    It is an open binary file at position 0, and is closed when the call has ended. The client chooses `name`, which has
    no folders in it, and `content_type`; trust neither. `size_bytes` is the size of the content.
    """

    def __init__(self, name: str = "", content_type: str = "application/octet-stream") -> None:
        self.name = name.replace("\\", "/").rpartition("/")[2].replace("\0", "")[:NAME_MAX]
        self.content_type = content_type
        self.size_bytes = 0
        self._bytes: IO[bytes] = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115

    def write(self, data: bytes) -> int:
        """Writes at the current position; returns the size. Errors: OSError if the temporary folder is full."""
        self.size_bytes += len(data)
        return self._bytes.write(data)

    def read(self, size: int = -1) -> bytes:
        """Reads up to `size` bytes from the current position; -1 reads to the end."""
        return self._bytes.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Changes the position, as of a binary file; returns it."""
        return self._bytes.seek(offset, whence)

    def tell(self) -> int:
        """Current position in bytes."""
        return self._bytes.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._bytes)

    def content(self) -> bytes:
        """Whole content, independent of the current position; the position is at the end afterwards."""
        self._bytes.seek(0)
        return self._bytes.read()

    def save(self, path: str | Path) -> None:
        """Copies the whole content to a local file. Errors: OSError."""
        self._bytes.seek(0)
        with open(path, "wb") as target:
            shutil.copyfileobj(self._bytes, target)

    @property
    def closed(self) -> bool:
        return self._bytes.closed

    def close(self) -> None:
        self._bytes.close()

    def __repr__(self) -> str:
        return f"File({self.name!r}, {self.content_type!r}, {self.size_bytes} bytes)"
