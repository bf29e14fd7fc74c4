"""The disk cache: checkpoints fetched over the network, kept on the node's own disk within a budget.

A checkpoint is a folder: its manifest, and an image of its segment, written behind the fetch as chunks arrive. No
list of present chunks is kept: the file system knows the holes, and each chunk is verified against the manifest when
it is read, so an image that a crash left half-written is as good as what is in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetstart import native
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange, Manifest, chunk_ranges, read_manifest

from ..fetch.order import ranges_of
from ..sources.base import PAGE_BYTES, Piece
from ..sources.errors import ReadCancelled, SourceError
from ..sources.folder import FILE_RUN_BYTES, FileReader
from ..sources.throttle import BackgroundThrottle
from .eviction import EvictionCandidate, choose_evictions

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
IMAGE = "segment"
CLOSE_S = 2.0
"""Longest wait for the writer thread at shutdown."""
RESERVE_BYTES = 1 << 30
"""Free space left on the disk whatever the budget: logs and Redis write there too."""


class DiskImage:
    """One checkpoint on the disk, as a chunk source. Thread-safe; may be read while it is written."""

    name = "disk"
    run_bytes = FILE_RUN_BYTES

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
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


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    """A chunk to write, unless its segment has been evicted by then."""

    image: DiskImage
    chunk: ChunkRange
    region: weakref.ref[native.Region]


class DiskCache:
    """The disk cache of a node. Called from one thread, except `write_behind`; a thread of its own writes."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._images: dict[CheckpointId, DiskImage] = {}
        self._manifests: dict[CheckpointId, bytes] = {}
        self._queue: queue.SimpleQueue[_PendingWrite | None] = queue.SimpleQueue()
        self._abandoned: set[DiskImage] = set()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.iterdir():
            self._load(path)
        self._writer = threading.Thread(target=self._write, name="disk-tier", daemon=True)
        self._writer.start()

    @property
    def used_bytes(self) -> int:
        return sum(image.size_bytes for image in self._images.values())

    def ranges(self) -> dict[CheckpointId, list[tuple[int, int]]]:
        """(begin, end) of the chunks present, by checkpoint."""
        return {checkpoint: image.ranges() for checkpoint, image in self._images.items()}

    def manifest(self, checkpoint: CheckpointId) -> bytes | None:
        return self._manifests.get(checkpoint)

    def image(self, checkpoint: CheckpointId) -> DiskImage | None:
        """The image of a checkpoint, marked as used; None if there is none."""
        image = self._images.get(checkpoint)
        if image is not None:
            image.uses += 1
            image.touch()
        return image

    def keep(self, checkpoint: CheckpointId, manifest: Manifest, data: bytes, in_use: set[CheckpointId]) -> None:
        """Creates an image of the checkpoint, if the budget allows. A disk that fails only costs the next start its
        speed."""
        try:
            if not self._make_room(manifest.total_bytes, in_use):
                return
            folder = self._folder / checkpoint
            folder.mkdir(exist_ok=True, mode=0o700)
            image = DiskImage(folder, manifest)
            temporary = folder / f"{MANIFEST}.new"
            temporary.write_bytes(data)
            temporary.replace(folder / MANIFEST)
        except OSError as error:
            log.warning("cannot cache a checkpoint on the disk", extra={"checkpoint": checkpoint, "error": str(error)})
            return
        self._images[checkpoint], self._manifests[checkpoint] = image, data

    def write_behind(self, image: DiskImage, chunk: ChunkRange, region: native.Region) -> None:
        """Queues a chunk for writing. Thread-safe. Does not keep the memory: a segment evicted before is not
        written."""
        self._queue.put(_PendingWrite(image, chunk, weakref.ref(region)))

    def drop(self, checkpoint: CheckpointId) -> None:
        image = self._images.pop(checkpoint, None)
        self._manifests.pop(checkpoint, None)
        if image is not None:
            shutil.rmtree(image.folder, ignore_errors=True)

    def close(self) -> None:
        """Stops writing: chunks not written by now are dropped."""
        self._abandoned.update(self._images.values())
        self._queue.put(None)
        self._writer.join(CLOSE_S)

    def _load(self, path: Path) -> None:
        """Loads the image of an earlier daemon; removes anything that is not an image."""
        try:
            data = (path / MANIFEST).read_bytes()
            checkpoint = CheckpointId(path.name)
            self._images[checkpoint] = DiskImage(path, read_manifest(data, checkpoint))
            self._manifests[checkpoint] = data
        except (OSError, CheckpointInvalid) as error:
            log.warning(
                "removing an invalid checkpoint from the disk cache", extra={"path": str(path), "error": str(error)}
            )
            shutil.rmtree(path, ignore_errors=True)

    def _make_room(self, needed_bytes: int, in_use: set[CheckpointId]) -> bool:
        free_bytes = min(self._budget_bytes - self.used_bytes, shutil.disk_usage(self._folder).free - RESERVE_BYTES)
        candidates = [
            EvictionCandidate(
                checkpoint=checkpoint,
                size_bytes=image.size_bytes,
                fetch_s=image.size_bytes / 1e9,  # all came over the same network
                uses=image.uses,
                last_used_s=image.last_used_s,
                pinned=checkpoint in in_use,
            )
            for checkpoint, image in self._images.items()
        ]
        chosen = choose_evictions(needed_bytes, free_bytes, candidates, time.time())
        if chosen is None:
            log.info("no room in the disk cache", extra={"needed_bytes": needed_bytes, "free_bytes": free_bytes})
            return False
        for checkpoint in chosen:
            self.drop(checkpoint)
        return True

    def _write(self) -> None:
        while (job := self._queue.get()) is not None:
            region = job.region()
            if region is None or job.image in self._abandoned:
                continue
            room_bytes = -(-job.chunk.size_bytes // PAGE_BYTES) * PAGE_BYTES
            try:
                job.image.write(job.chunk, region.view(job.chunk.segment_offset, room_bytes))
                job.image.mark_written(job.chunk)
            except OSError as error:
                self._abandoned.add(job.image)
                extra = {"checkpoint": job.image.folder.name, "error": str(error)}
                log.warning("cannot write a checkpoint to the disk: the rest of it is not cached", extra=extra)
            del region


def _close(fd: int, reader: FileReader) -> None:
    reader.close()
    os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
