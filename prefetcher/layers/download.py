"""Writes the files of a layer, or of a version of a volume, into a folder, from its parts in the store.

Several threads read runs of chunks and verify each chunk; the calling thread writes them to the files that they cover.
It is one, because a layer is mostly thousands of small files, and threads that create files wait for each other. A
chunk that is not what the manifest says is read once more, then the download fails with the chunk's name. Checksums
find accidents; a digest of each chunk finds what somebody replaced in the store.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, groupby, islice
from pathlib import Path

from fleetstart.runtime.contract.errors import ChecksumMismatch, LayerInvalid
from fleetstart.runtime.contract.function.layer import LayerManifest, LayerRange, layer_ranges
from fleetstart.runtime.contract.ids import LayerId

from ..fetch.errors import with_retries
from ..sources.base import PAGE_BYTES, ObjectRange, Piece, Source
from ..sources.errors import ObjectMissing, ObjectSizeMismatch
from .kinds import TreeKind

RUN_BYTES = 16 * 1024 * 1024
"""Bytes of one read, and memory of each thread."""


def download(
    source: Source,
    kind: TreeKind,
    layer: LayerId,
    manifest: LayerManifest,
    folder: Path,
    threads: int,
    wrote: Callable[[int], None],
) -> None:
    """Writes all files below the folder, which is empty; `wrote` is told the bytes of each run. Blocks.

    Errors: LayerInvalid, ChecksumMismatch, StoreFailed, OSError.
    """
    files = _LayerFiles(manifest, folder)
    files.create()
    stopped = threading.Event()
    waiting = iter(runs_of(layer_ranges(manifest), RUN_BYTES))
    reading: deque[tuple[list[LayerRange], Future[mmap.mmap]]] = deque()
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix=f"layer-{layer[:8]}") as pool:

        def read_next() -> None:
            for run in islice(waiting, 1):
                reading.append((run, pool.submit(read_run, source, kind, layer, run, stopped)))

        try:
            for _ in range(threads + 1):  # one is ready when the writer comes to it
                read_next()
            while reading:
                run, done = reading.popleft()
                with done.result() as memory, memoryview(memory) as room:
                    files.write_run(run, room)
                wrote(sum(chunk.size_bytes for chunk in run))
                read_next()
        finally:
            stopped.set()  # after an error, the others end at their next chunk


def runs_of(ranges: Sequence[LayerRange], run_bytes: int) -> list[list[LayerRange]]:
    """Groups chunks that lie one after the other in one object into reads of about `run_bytes`."""
    # Two equal parts, one after the other, are one object twice: its begin in the stream tells them apart.
    return [
        list(group)
        for _, group in groupby(
            ranges, lambda chunk: (chunk.offset - chunk.object_offset, chunk.object_offset // run_bytes)
        )
    ]


def read_run(
    source: Source, kind: TreeKind, layer: LayerId, run: Sequence[LayerRange], stopped: threading.Event
) -> mmap.mmap:
    """Memory with the chunks of a run, each at a page. Errors: as of `download`, ReadCancelled."""
    memory = mmap.mmap(-1, sum(_pages(chunk.size_bytes) for chunk in run))
    try:
        with memoryview(memory) as room:
            _read_verified(source, kind, layer, run, room, stopped)
    except BaseException:
        memory.close()
        raise
    return memory


def _read_verified(
    source: Source,
    kind: TreeKind,
    layer: LayerId,
    run: Sequence[LayerRange],
    room: memoryview,
    stopped: threading.Event,
) -> None:
    try:
        found = _checksums(source, kind, layer, run, room, stopped)
        if found != [chunk.checksum for chunk in run]:
            found = _checksums(source, kind, layer, run, room, stopped)
    except ObjectMissing as error:
        raise LayerInvalid(
            f"{kind.name} {layer[:12]}: {run[0].object} is not in the store", hint=kind.send_again
        ) from error
    except ObjectSizeMismatch as error:
        raise LayerInvalid(f"{kind.name} {layer[:12]}: {error}", hint=kind.send_again) from error
    for chunk, checksum in zip(run, found, strict=True):
        if checksum != chunk.checksum:
            raise ChecksumMismatch(
                f"chunk {chunk.index} of {kind.name} {layer[:12]} ({chunk.object}): checksum {checksum:016x}, expected "
                f"{chunk.checksum:016x}",
                hint=f"the object in the store is damaged; {kind.send_again}",
            )
    _check_digests(kind, layer, run, room)


def _check_digests(kind: TreeKind, layer: LayerId, run: Sequence[LayerRange], room: memoryview) -> None:
    """Errors: ChecksumMismatch for a chunk that somebody has replaced, with the same checksum."""
    begin = 0
    for chunk in run:
        with room[begin : begin + chunk.size_bytes] as data:
            if chunk.digest and hashlib.sha256(data).hexdigest() != chunk.digest:
                raise ChecksumMismatch(
                    f"chunk {chunk.index} of {kind.name} {layer[:12]} ({chunk.object}) is not the one that was "
                    f"published: its SHA-256 is not {chunk.digest[:12]}…",
                    hint=f"somebody has written to the store: see who can; {kind.send_again}",
                )
        begin += _pages(chunk.size_bytes)


def _checksums(
    source: Source,
    kind: TreeKind,
    layer: LayerId,
    run: Sequence[LayerRange],
    room: memoryview,
    stopped: threading.Event,
) -> list[int]:
    pieces: list[Piece] = []
    begin = 0
    for chunk in run:
        size = _pages(chunk.size_bytes)
        pieces.append(Piece(chunk.size_bytes, room[begin : begin + size]))
        begin += size
    key = kind.key(layer, run[0].object)
    asked = ObjectRange(key, run[0].object_bytes, run[0].object_offset, pieces)
    found: list[int] = []

    def read() -> bytes:
        found[:] = source.read(asked, stopped.is_set)
        return b""

    try:
        with_retries(read, f"{run[0].object} of {kind.name} {layer[:12]}")
    finally:
        for piece in pieces:
            piece.room.release()
    return found


class _LayerFiles:
    """The files of a layer, written in pieces."""

    def __init__(self, manifest: LayerManifest, folder: Path) -> None:
        self._folder = folder
        self._files = [file for file in manifest.files if file.size_bytes]
        self._empty = [file for file in manifest.files if not file.size_bytes]
        self._begins = list(accumulate((file.size_bytes for file in self._files), initial=0))
        self._paths = manifest.files

    def create(self) -> None:
        """Makes the folders and the empty files."""
        for parent in sorted({os.path.dirname(file.path) for file in self._paths}):
            (self._folder / parent).mkdir(mode=0o755, parents=True, exist_ok=True)
        for file in self._empty:
            (self._folder / file.path).touch(mode=0o755 if file.executable else 0o644)

    def write_run(self, run: Sequence[LayerRange], room: memoryview) -> None:
        """Writes chunks that lie in memory each at a page."""
        begin = 0
        for chunk in run:
            with room[begin : begin + chunk.size_bytes] as data:
                self.write(chunk.offset, data)
            begin += _pages(chunk.size_bytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes bytes of the stream, from `offset` on, to the files that they belong to."""
        index = bisect_right(self._begins, offset) - 1
        end = offset + len(data)
        at = offset
        while at < end:
            file, begin = self._files[index], self._begins[index]
            upto = min(end, begin + file.size_bytes)
            mode = 0o755 if file.executable else 0o644
            descriptor = os.open(self._folder / file.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
            try:
                _write_all(descriptor, data[at - offset : upto - offset], at - begin)
            finally:
                os.close(descriptor)
            at, index = upto, index + 1


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    with data:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
