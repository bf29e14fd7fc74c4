"""One checkpoint's image on the node's disk: the bytes of its segment, with holes where chunks are not there yet."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange, Manifest, chunk_ranges

from ..fetch.order import ranges_of
from ..sources.base import Piece
from ..sources.errors import ReadCancelled, SourceError
from ..sources.folder import FILE_RUN_BYTES, FileReader
from ..sources.throttle import BackgroundThrottle

MANIFEST = "manifest.json"
IMAGE = "segment"
BLOCK_BYTES = 512
"""Unit in which the kernel counts what a file takes."""


class DiskImage:
    """One checkpoint on the disk, as a chunk source. Thread-safe; may be read while it is written."""

    name = "disk"
    run_bytes = FILE_RUN_BYTES

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.checkpoint = CheckpointId(folder.name)
        self.size_bytes = manifest.total_bytes
        self.uses = 1
        self._fd = os.open(folder / IMAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._reader = FileReader(self._fd)
        weakref.finalize(self, _close, self._fd, self._reader)
        os.ftruncate(self._fd, manifest.total_bytes)
        self._present = {chunk.index for chunk in self.present(chunk_ranges(manifest))}
        self._ranges: tuple[int, list[tuple[int, int]]] = (0, [])
        """(number of chunks, their ranges): cached until a chunk is added."""

    def present(self, chunks: Sequence[ChunkRange]) -> list[ChunkRange]:
        """The chunks without a hole; they are verified when they are read."""
        found = []
        begin = end = 0
        for chunk in chunks:  # in the order of their offsets
            if chunk.segment_offset >= end:
                begin, end = self._extent(chunk.segment_offset)
            if begin <= chunk.segment_offset and chunk.segment_offset + chunk.size_bytes <= end:
                found.append(chunk)
        return found

    def read(
        self,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None = None,
    ) -> Iterator[int]:
        """Reads at full speed: the throttle is for the network."""
        if stopped():
            raise ReadCancelled(IMAGE)
        try:
            yield from self._reader.read_run(run[0].segment_offset, pieces)
        except (OSError, EOFError) as error:
            raise SourceError(f"{self.folder.name[:12]} on the disk: {error}") from error

    def write(self, chunk: ChunkRange, buffer: memoryview) -> None:
        """Writes a chunk, past the page cache where possible: the bytes are in memory already. Errors: OSError."""
        try:
            direct = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            _write_all(self._fd, buffer, chunk.segment_offset)
            return
        try:
            _write_all(direct, buffer, chunk.segment_offset)
        finally:
            os.close(direct)

    def mark_written(self, chunk: ChunkRange) -> None:
        self._present.add(chunk.index)

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, end) of the chunks present."""
        if self._ranges[0] != len(self._present):
            present = self._present.copy()  # the writer adds to it
            self._ranges = (len(present), ranges_of(sorted(present)))
        return self._ranges[1]

    def touch(self) -> None:
        """Marks the image as used now, by its manifest's modification time."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / MANIFEST)

    @property
    def unwritten_bytes(self) -> int:
        """What it may still take of the disk: holes take nothing."""
        return max(0, self.size_bytes - os.fstat(self._fd).st_blocks * BLOCK_BYTES)

    def remove(self) -> None:
        """Gives its space back, also where a fetch has it open: what is not read of it by then comes from elsewhere."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def last_used_s(self) -> float:
        with contextlib.suppress(OSError):
            return (self.folder / MANIFEST).stat().st_mtime
        return 0.0

    def _extent(self, offset: int) -> tuple[int, int]:
        """(begin, end) of the next extent of data from the offset on."""
        try:
            begin = os.lseek(self._fd, offset, os.SEEK_DATA)
            return begin, os.lseek(self._fd, begin, os.SEEK_HOLE)
        except OSError:  # no data from here on
            return self.size_bytes, self.size_bytes


def _close(fd: int, reader: FileReader) -> None:
    reader.close()
    os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
