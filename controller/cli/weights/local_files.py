"""Where the bytes of a checkpoint's source come from: files of this machine, objects in S3, or memory.

All that publishing asks of one is here, so that a plan and both passes over it are the same for each. An origin is
read at any place, by several threads at once, and says so if it is no longer what it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleetstart.runtime.contract.errors import CheckpointInvalid, WeightsMissing

BLOCK_BYTES = 1024 * 1024
"""One read and one piece of an upload: large enough to be cheap, small enough for a smooth bar."""


class SourceFile(Protocol):
    """One file. `str()` says which, to a person."""

    @property
    def name(self) -> str:
        """Without the folder."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def facts(self) -> tuple[object, ...]:
        """Other ones whenever its bytes could be other ones. Plain values."""
        ...

    def blocks(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """Exactly these bytes. Errors: CheckpointInvalid if they are not there any more."""
        ...


class SourceFolder(Protocol):
    """What lies together: a model with its files."""

    def origins(self) -> dict[str, SourceFile]:
        """By name, in the order of names; not what lies deeper. Errors: WeightsMissing."""
        ...


def read_all(origin: SourceFile) -> bytes:
    return read_at(origin, 0, origin.size_bytes)


def read_at(origin: SourceFile, offset: int, size_bytes: int) -> bytes:
    return b"".join(origin.blocks(offset, size_bytes))


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def facts(self) -> tuple[object, ...]:
        stat = self.path.stat()
        return str(self.path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino

    def blocks(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        with self.path.open("rb", buffering=0) as file:
            for begin in range(0, size_bytes, BLOCK_BYTES):
                wanted = min(BLOCK_BYTES, size_bytes - begin)
                block = os.pread(file.fileno(), wanted, offset + begin)
                if len(block) != wanted:
                    raise CheckpointInvalid(f"{self.path} became shorter while it was read")
                yield block


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """What is no file of the user's, but was made for the checkpoint, or stands for one that is not at hand."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def facts(self) -> tuple[object, ...]:
        """None of its own: it follows from the files that it was made of."""
        return ()

    def blocks(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        yield self.data[offset : offset + size_bytes]


@dataclass(frozen=True, slots=True)
class LocalFolder:
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def origins(self) -> dict[str, SourceFile]:
        return {path.name: LocalFile(path) for path in sorted(self.path.iterdir()) if path.is_file()}


@dataclass(frozen=True, slots=True)
class FileList:
    """Files that were named one by one, as if they lay in one folder."""

    paths: Sequence[Path]

    def __str__(self) -> str:
        return " ".join(map(str, self.paths))

    def origins(self) -> dict[str, SourceFile]:
        found: dict[str, SourceFile] = {}
        for path in sorted(self.paths, key=lambda path: path.name):
            if not path.is_file():
                raise WeightsMissing(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}")
            if path.name in found:
                raise WeightsMissing(f"{found[path.name]} and {path} have the same name")
            found[path.name] = LocalFile(path)
        return found
