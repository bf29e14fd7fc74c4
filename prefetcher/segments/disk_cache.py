"""The disk cache: checkpoints fetched over the network, kept on the node's own disk within a budget.

A checkpoint is a folder: its manifest, and an image of its segment, written behind the fetch as chunks arrive. No
list of present chunks is kept: the file system knows the holes, and each chunk is verified against the manifest when
it is read, so an image that a crash left half-written is as good as what is in it.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from fleetstart import native
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import ChunkRange, Manifest, read_manifest

from ..sources.base import PAGE_BYTES
from .disk_image import MANIFEST, DiskImage
from .eviction import EvictionCandidate, choose_evictions

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for the writer thread at shutdown."""
RESERVE_BYTES = 1 << 30
"""Free space left on the disk whatever the budget: logs and Redis write there too."""


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    """A chunk to write, unless its segment has been evicted by then."""

    image: DiskImage
    chunk: ChunkRange
    region: weakref.ref[native.Region]


class DiskCache:
    """The disk cache of a node. Called from one thread, except `write_behind`; a thread of its own writes, and drops an
    image that it cannot write."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._images: dict[CheckpointId, DiskImage] = {}
        self._manifests: dict[CheckpointId, bytes] = {}
        self._queue: queue.SimpleQueue[_PendingWrite | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        """Of the images, their manifests and their folders."""
        self._closing = False
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.iterdir():
            self._load(path)
        self._writer = threading.Thread(target=self._write, name="disk-tier", daemon=True)
        self._writer.start()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(image.size_bytes for image in self._images.values())

    def ranges(self) -> dict[CheckpointId, list[tuple[int, int]]]:
        """(begin, end) of the chunks present, by checkpoint."""
        with self._lock:
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
        with self._lock:
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
                extra = {"checkpoint": checkpoint, "error": str(error)}
                log.warning("cannot cache a checkpoint on the disk", extra=extra)
                return
            self._images[checkpoint], self._manifests[checkpoint] = image, data

    def write_behind(self, image: DiskImage, chunk: ChunkRange, region: native.Region) -> None:
        """Queues a chunk for writing. Thread-safe. Does not keep the memory: a segment evicted before is not
        written, nor is an image that the cache has no more."""
        self._queue.put(_PendingWrite(image, chunk, weakref.ref(region)))

    def drop(self, checkpoint: CheckpointId) -> None:
        with self._lock:
            image = self._images.pop(checkpoint, None)
            self._manifests.pop(checkpoint, None)
            if image is not None:
                image.remove()

    def close(self) -> None:
        """Stops writing: chunks not written by now are dropped."""
        self._closing = True
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
        unwritten_bytes = sum(image.unwritten_bytes for image in self._images.values())
        disk_bytes = shutil.disk_usage(self._folder).free - unwritten_bytes - RESERVE_BYTES
        free_bytes = min(self._budget_bytes - self.used_bytes, disk_bytes)
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
            if region is None or self._closing or not self._has(job.image):
                continue
            room_bytes = -(-job.chunk.size_bytes // PAGE_BYTES) * PAGE_BYTES
            try:
                job.image.write(job.chunk, region.view(job.chunk.segment_offset, room_bytes))
                job.image.mark_written(job.chunk)
            except OSError as error:
                self._give_up(job.image, error)
            del region

    def _has(self, image: DiskImage) -> bool:
        return self._images.get(image.checkpoint) is image

    def _give_up(self, image: DiskImage, error: OSError) -> None:
        """Drops an image that cannot be written: its space is others' again, and the next fetch tries anew."""
        with self._lock:
            if self._has(image):
                self.drop(image.checkpoint)
        extra = {"checkpoint": image.checkpoint, "error": str(error)}
        log.warning("cannot write a checkpoint to the disk: it is not cached", extra=extra)
