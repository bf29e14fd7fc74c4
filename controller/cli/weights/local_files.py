"""Source files of a checkpoint: the protocol, and its implementations over local files and memory (S3: `s3_files.py`).

A source file is read at any offset, by several threads at once, and a change during the read is an error. So the plan
and both passes over the files are the same for each implementation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleetstart.runtime.contract.errors import CheckpointInvalid, WeightsMissing

BLOCK_BYTES = 1024 * 1024
"""Size of one read and one upload block: large enough to be cheap, small enough for a smooth progress bar."""


class SourceFile(Protocol):
    """One file of a model. `str()` names it in messages."""

    @property
    def name(self) -> str:
        """File name without its folder."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def facts(self) -> tuple[object, ...]:
        """Plain values that change whenever the file's bytes could have changed."""
        ...

    def blocks(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """Reads a range in blocks. Errors: CheckpointInvalid if the file has changed."""
        ...


class SourceFolder(Protocol):
    """A folder with a model's files."""

    def source_files(self) -> dict[str, SourceFile]:
        """Files by name, in order; not those in folders below. Errors: WeightsMissing."""
        ...


def read_all(origin: SourceFile) -> bytes:
    return read_at(origin, 0, origin.size_bytes)


def read_at(origin: SourceFile, offset: int, size_bytes: int) -> bytes:
    return b"".join(origin.blocks(offset, size_bytes))


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of this machine."""

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
    """A file in memory: generated for the checkpoint, or a stand-in for one that is not available."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def facts(self) -> tuple[object, ...]:
        """Empty: the content follows from the files that it was generated from."""
        return ()

    def blocks(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        yield self.data[offset : offset + size_bytes]


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def source_files(self) -> dict[str, SourceFile]:
        return {path.name: LocalFile(path) for path in sorted(self.path.iterdir()) if path.is_file()}


@dataclass(frozen=True, slots=True)
class FileList:
    """Files that were named one by one, as if they were in one folder."""

    paths: Sequence[Path]

    def __str__(self) -> str:
        return " ".join(map(str, self.paths))

    def source_files(self) -> dict[str, SourceFile]:
        found: dict[str, SourceFile] = {}
        for path in sorted(self.paths, key=lambda path: path.name):
            if not path.is_file():
                raise WeightsMissing(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}")
            if path.name in found:
                raise WeightsMissing(f"{found[path.name]} and {path} have the same name")
            found[path.name] = LocalFile(path)
        return found
