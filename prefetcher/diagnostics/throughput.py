"""`python -m fleetstart.prefetcher.diagnostics.throughput`: measures, within seconds, how fast this machine can load
weights; prints JSON.

Measures what fetches do, with their code: memory of the node's kind of pages, direct reads of chunks from the disk
under FS_HOME, ranges of the store; each by several threads. A limit that cannot be measured is left out, with the
reason. `fs doctor` runs this as a process, since the command line has no native code, and interprets the figures.
The file that is read has no name, so nothing can be left of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from fleetstart import native
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.node.throughput import Ceilings, Limit
from fleetstart.runtime.contract.sizes import GIB, MIB
from fleetstart.runtime.contract.store_url import S3Url, parse_store
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES

from ..segments.slab_memory import KINDS, Pages, open_pool
from ..sources.folder import DISK_THREADS
from ..sources.http_settings import HttpSettings, http_settings
from .rounds import Rounds

RESERVE_BYTES = GIB
"""Free space left on the disk."""
DISK_LEAST_BYTES = 4 * CHUNK_BYTES
WRITE_BYTES = 64 * MIB
"""Bytes between two checks of the clock; synced by then, so that a slow disk cannot promise more than it holds."""
MEMORY_SHARE = 4
"""Uses at most one part in so many of the available memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Sizes and time limits of the measurements. The defaults take some five seconds on a slow machine."""

    memory_bytes: int = 512 * MIB
    """More than caches hold."""
    disk_bytes: int = 512 * MIB
    store_least_bytes: int = 16 * MIB
    """A smaller part measures round trips only."""
    rounds: int = 3
    round_s: float = 0.5
    prefault_s: float = 1.0
    write_s: float = 1.5
    kinds: Sequence[Pages] = KINDS
    http: HttpSettings = field(default_factory=HttpSettings)


class _LeftOut(Exception):
    """There is nothing to measure; the message says why."""


class _Failed(Exception):
    """The measurement failed; the message says why."""


class _Measurement:
    """Results so far."""

    def __init__(self) -> None:
        self.bytes_per_s: dict[Limit, float] = {}
        self.measured: dict[Limit, str] = {}
        self.left_out: dict[Limit, str] = {}
        self.failed: dict[Limit, str] = {}
        self.buffered: list[Limit] = []

    def note(self, limit: Limit, measure: Callable[[], tuple[float, str]]) -> None:
        try:
            rate, how = measure()
        except _LeftOut as error:
            self.left_out[limit] = str(error)
            return
        except (_Failed, OSError) as error:
            self.failed[limit] = str(error)
            return
        self.bytes_per_s[limit], self.measured[limit] = rate, how


def measure(home: Path, store: str, scope: Scope) -> Ceilings:
    """`store` is a folder or s3://bucket/prefix. Errors: Unavailable if there is no shared memory at all."""
    found = _Measurement()
    cores = len(os.sched_getaffinity(0))
    budget_bytes = min(scope.memory_bytes, _available_bytes() // MEMORY_SHARE)
    pool, refused = open_pool("fleetstart-doctor", max(budget_bytes, 2 * CHUNK_BYTES), scope.kinds)
    found.note("prefault", lambda: _prefault(pool, cores, scope))
    region = pool.take(max(1, pool.clean) * pool.slab_bytes)
    for offset in range(0, region.size_bytes, pool.slab_bytes):
        region.populate(offset, pool.slab_bytes)  # mostly done; where memory is short, this raises instead of a signal
    found.note("checksum", lambda: _checksum(region, cores, scope))
    found.note("disk", lambda: _disk("disk", home, region, scope, found))
    found.note("store", lambda: _store(store, home, region, scope, found))
    return Ceilings(
        pages=pool.pages,
        refused=refused,
        bytes_per_s=found.bytes_per_s,
        measured=found.measured,
        left_out=found.left_out,
        failed=found.failed,
        buffered=found.buffered,
    )


def _prefault(pool: native.SlabPool, cores: int, scope: Scope) -> tuple[float, str]:
    """Memory throughput, in one round: afterwards the memory is no longer new, which is what may cost the host
    something.

    The other measurements use the slabs made here.
    """
    slabs = pool.capacity - pool.clean
    if slabs == 0:
        raise _LeftOut(f"the pool has {pool.capacity} slabs, and needed all of them to begin with")
    rounds = Rounds(slabs, lambda number, stopped: pool.slab_bytes if pool.prepare(pool.capacity) else 0)
    return rounds.run(cores, scope.prefault_s), f"by {cores} threads"


def _checksum(region: native.Region, cores: int, scope: Scope) -> tuple[float, str]:
    def take(number: int, stopped: Callable[[], bool]) -> int:
        native.xxh3(region.view(number * CHUNK_BYTES, CHUNK_BYTES))
        return CHUNK_BYTES

    rounds = Rounds(region.size_bytes // CHUNK_BYTES, take)
    return median(rounds.run(cores, scope.round_s) for _ in range(scope.rounds)), f"by {cores} threads"


# ── disk ───────────────────────────────────────────────────────────────────────────────────────────


def _disk(limit: Limit, path: Path, region: native.Region, scope: Scope, found: _Measurement) -> tuple[float, str]:
    folder = _existing(path)
    room_bytes = shutil.disk_usage(folder).free - RESERVE_BYTES
    size_bytes = min(scope.disk_bytes, room_bytes) // CHUNK_BYTES * CHUNK_BYTES
    if size_bytes < DISK_LEAST_BYTES:
        raise _Failed(f"{folder} has too little room: {room_bytes + RESERVE_BYTES:,} bytes are free")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        size_bytes = _write(file.fileno(), size_bytes, scope.write_s)
        direct = _open_direct(file.fileno(), region)
        try:
            # Other load on a disk only slows it: the best round is its limit.
            rate = max(_read_rates(file.fileno(), direct, size_bytes, region, scope))
        finally:
            if direct is not None:
                os.close(direct)
    if direct is None:
        found.buffered.append(limit)
    return rate, f"{folder}, {'direct' if direct is not None else 'buffered'} reads by {DISK_THREADS} threads"


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _write(fd: int, size_bytes: int, limit_s: float) -> int:
    """Writes incompressible bytes, as many as the disk takes in that time; returns how many."""
    noise = memoryview(os.urandom(CHUNK_BYTES + size_bytes // CHUNK_BYTES))
    stop_s = time.monotonic() + limit_s
    done = 0
    while done < size_bytes and (done < DISK_LEAST_BYTES or time.monotonic() < stop_s):
        for _ in range(min(WRITE_BYTES, size_bytes - done) // CHUNK_BYTES):
            begin = done // CHUNK_BYTES  # no two chunks are alike, for disks that store equal blocks once
            rest = noise[begin : begin + CHUNK_BYTES]
            while rest:
                rest = rest[os.write(fd, rest) :]
            done += CHUNK_BYTES
        os.fdatasync(fd)
    return done


def _open_direct(fd: int, region: native.Region) -> int | None:
    """A descriptor for direct I/O, if the file system supports it."""
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    try:
        native.read_direct(direct, 0, region.view(0, CHUNK_BYTES), CHUNK_BYTES)
    except OSError:
        os.close(direct)
        return None
    return direct


def _read_rates(fd: int, direct: int | None, size_bytes: int, region: native.Region, scope: Scope) -> list[float]:
    chunks = region.size_bytes // CHUNK_BYTES

    def take(number: int, stopped: Callable[[], bool]) -> int:
        buffer = region.view(number % chunks * CHUNK_BYTES, CHUNK_BYTES)
        if direct is not None:
            native.read_direct(direct, number * CHUNK_BYTES, buffer, CHUNK_BYTES)
        else:
            native.read_checksum(fd, number * CHUNK_BYTES, buffer)
        return CHUNK_BYTES

    rounds = Rounds(size_bytes // CHUNK_BYTES, take)
    rates = []
    for _ in range(scope.rounds):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        rates.append(rounds.run(DISK_THREADS, scope.round_s))
    return rates


# ── store ──────────────────────────────────────────────────────────────────────────────────────────


def _store(store: str, home: Path, region: native.Region, scope: Scope, found: _Measurement) -> tuple[float, str]:
    where = parse_store(store)
    if isinstance(where, S3Url):
        from .store_throughput import NothingToRead, NotMeasured, measure_store

        try:
            return measure_store(
                where,
                region,
                rounds=scope.rounds,
                round_s=scope.round_s,
                least_bytes=scope.store_least_bytes,
                http=scope.http,
            )
        except NothingToRead as error:
            raise _LeftOut(str(error)) from error
        except NotMeasured as error:
            raise _Failed(str(error)) from error
    folder = where.absolute()
    if _existing(folder).stat().st_dev != _existing(home).stat().st_dev:
        return _disk("store", folder, region, scope, found)
    if "disk" not in found.bytes_per_s:
        raise _Failed(f"a folder on the disk of FS_HOME: {found.failed['disk']}")
    return found.bytes_per_s["disk"], "a folder on the disk of FS_HOME"


def _available_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast this machine can bring weights, as JSON.")
    parser.add_argument("--home", type=Path, required=True, help="a folder on the disk that is measured (FS_HOME)")
    parser.add_argument("--store", required=True, metavar="PATH|s3://…")
    parser.add_argument("--bytes", type=int, default=0, help="how much is moved, for quick tests")
    asked = parser.parse_args()
    scope = Scope()
    if asked.bytes:
        scope = Scope(memory_bytes=asked.bytes, disk_bytes=asked.bytes, store_least_bytes=asked.bytes // 4, rounds=1)
    scope = replace(scope, http=http_settings(os.environ))
    try:
        found = measure(asked.home.absolute(), asked.store, scope)
    except (FleetError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
