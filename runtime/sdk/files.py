"""What a handler gets of a file that was sent to it: its name, its type, and its bytes as an open file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MEMORY_BYTES = 1024 * 1024
"""Of one file; what is larger lies in the worker's temporary folder, out of the way of Python's heap."""
NAME_MAX = 255


class File:
    """A file of a request: `def read(page: File): ...`. Gone when the call has ended.

    It is an open binary file for whatever takes one (`PIL.Image.open(file)`), with the name and the content type that
    its sender gave it. The name has no folders in it, but is the sender's choice all the same.
    """

    def __init__(self, name: str = "", content_type: str = "application/octet-stream") -> None:
        self.name = name.replace("\\", "/").rpartition("/")[2].replace("\0", "")[:NAME_MAX]
        self.content_type = content_type
        self.size_bytes = 0
        self._bytes: IO[bytes] = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115

    def write(self, data: bytes) -> int:
        """Appends; for whoever makes one. Errors: OSError if the worker's temporary folder is full."""
        self.size_bytes += len(data)
        return self._bytes.write(data)

    def read(self, size: int = -1) -> bytes:
        return self._bytes.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._bytes.seek(offset, whence)

    def tell(self) -> int:
        return self._bytes.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._bytes)

    def content(self) -> bytes:
        """All of it, wherever it was read to."""
        self._bytes.seek(0)
        return self._bytes.read()

    def save(self, path: str | Path) -> None:
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
