"""Measurements of a node when it comes up: its link to the store, its disk, its memory. Priors of the planner.

Bounded, so that nobody waits for it: a second and 8 MiB of an object that controllers keep in the store, 8 MiB on the
disk, a copy in memory. `throughput` measures the same at length, for `fs doctor`. Predictions begin with these figures,
and are replaced by what starts show.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fleetstart.runtime.contract.object_keys import LINK_PROBE, LINK_PROBE_BYTES
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.store_url import S3Url, parse_store

from ..sources.base import ObjectRange, Piece, Source
from ..sources.errors import ObjectMissing, ObjectSizeMismatch, ReadCancelled, SourceError
from ..sources.folder import FileReader
from .rounds import Rounds

log = logging.getLogger(__name__)

LIMIT_S = 1.0
CONNECTIONS = 4
"""Half of what a fetch uses: a link of a gigabit is full with two."""
PIECE_BYTES = 256 * 1024
DISK_BYTES = 8 * MIB
COPY_BYTES = 32 * MIB
"""More than most caches hold."""
LEAST_S = 1e-3


def measure_machine(home: Path, store: str) -> dict[str, float]:
    """Bytes a second of "disk" and "memory"; of "store" too, if that is a folder. What cannot be measured is left
    out. Blocks for a fraction of a second."""
    found = {"memory": _memory()}
    where = parse_store(store)
    try:
        found["disk"] = _disk(home)
        if not isinstance(where, S3Url):
            same = where.stat().st_dev == home.stat().st_dev
            found["store"] = found["disk"] if same else _disk(where)
    except OSError as error:
        log.info("the disk was not measured", extra={"error": str(error)})
    return found


def measure_link(source: Source) -> float:
    """Bytes a second from an object store; 0 if it cannot be told. Blocks for LIMIT_S at most, and a little."""
    arrivals: list[tuple[float, int]] = []
    stop_s = time.monotonic() + LIMIT_S
    share_bytes = LINK_PROBE_BYTES // CONNECTIONS

    def read(number: int) -> None:
        # Not closed here: the frames of an error hold views of it, and it goes with the last of them.
        room = memoryview(mmap.mmap(-1, share_bytes))
        pieces = [Piece(PIECE_BYTES, room[begin : begin + PIECE_BYTES]) for begin in range(0, share_bytes, PIECE_BYTES)]
        asked = ObjectRange(LINK_PROBE, LINK_PROBE_BYTES, number * share_bytes, pieces)
        with contextlib.suppress(ReadCancelled):
            for _ in source.read(asked, lambda: time.monotonic() >= stop_s):
                arrivals.append((time.monotonic(), PIECE_BYTES))

    try:
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="measure-link") as pool:
            list(pool.map(read, range(CONNECTIONS)))
    except (SourceError, ObjectMissing, ObjectSizeMismatch) as error:
        log.debug("the link to the store was not measured", extra={"error": str(error)})
        return 0.0
    return rate_of(arrivals)


def rate_of(arrivals: list[tuple[float, int]]) -> float:
    """Bytes a second of pieces by their times of arrival. The first one only starts the clock: before it, connections
    were made."""
    if len(arrivals) < 2:
        return 0.0
    ordered = sorted(arrivals)
    took_s = max(LEAST_S, ordered[-1][0] - ordered[0][0])
    return sum(size_bytes for _, size_bytes in ordered[1:]) / took_s


def _disk(folder: Path) -> float:
    """Direct reads of a file without a name. Errors: OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, DISK_BYTES) as memory:
        file.write(os.urandom(DISK_BYTES))
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        reader = FileReader(file.fileno())
        try:
            with memoryview(memory) as room:
                return Rounds(DISK_BYTES // MIB, lambda number, stopped: _read(reader, number * MIB, room)).run(
                    CONNECTIONS, LIMIT_S
                )
        finally:
            reader.close()


def _read(reader: FileReader, offset: int, room: memoryview) -> int:
    with room[offset : offset + MIB] as part:
        reader.read(offset, Piece(MIB, part))
    return MIB


def _memory() -> float:
    """Bytes a second that one core moves: each byte of a copy is read and written."""
    source, target = bytearray(COPY_BYTES), bytearray(COPY_BYTES)
    times_s: list[float] = []
    for _ in range(3):
        began_s = time.monotonic()
        target[:] = source
        times_s.append(time.monotonic() - began_s)
    return 2 * COPY_BYTES / max(LEAST_S, min(times_s))
