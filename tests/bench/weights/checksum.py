"""Benchmark of verification: its cost on the way in, and the candidates for the checksum.

Filling with and without checksums: from the disk, past the page cache, and from the object store. And candidates, one
thread over one chunk: again and again, so that the cache has it, and through memory that no cache holds. And the check
of digests in the background, which no start waits for: that the fill is as quick with it, and how long forged weights
could be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fleetstart import native
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES
from tests.bench.harness.caches import chill, disk_folder, prefaulted
from tests.bench.harness.compiled import compiled
from tests.bench.harness.range_server import BUCKET, credentials, serving
from tests.bench.harness.samples import Options, Report, fine, median, spread
from tests.bench.weights import ours
from tests.bench.weights.files import Files, in_rounds, record
from tests.bench.weights.loaders import Sample
from tests.prefetcher.nodes import Store

AIM = 0.9
MEMORY_BYTES, QUICK_BYTES = 512 << 20, 32 << 20
CACHED_TURNS = 16
Checksum = Callable[[Any], object]


def run(report: Report, options: Options, files: Files) -> None:
    paths(report, options, files)
    candidates(report, options)
    background(report, options)


def paths(report: Report, options: Options, files: Files) -> None:
    found: dict[str, list[Sample]] = {}
    with _both(str(files.store), files, {}) as nodes:
        runners = {f"disk, {name}": partial(_fill, node, files, cold=True) for name, node in nodes.items()}
        found |= in_rounds(options, runners, "checksums, disk")
    with serving(files.root) as url, _both(f"s3://{BUCKET}", files, credentials(url)) as nodes:
        runners = {f"store, {name}": partial(_fill, node, files, cold=False) for name, node in nodes.items()}
        found |= in_rounds(options, runners, "checksums, store")
    record(report, "checksums", found)
    gigabytes = files.size_bytes / 1e9
    rows = [["into a segment, GB/s", "unverified", "verified", "verified / unverified", "CPU s/GB", "of it verifying"]]
    worst = 1.0
    for path in ("disk", "store"):
        with_, without = found[f"{path}, verified"], found[f"{path}, unverified"]
        share = median([b.ready_s / a.ready_s for a, b in zip(with_, without, strict=True)])
        worst = min(worst, share)
        rates = [spread([gigabytes / one.ready_s for one in samples]) for samples in (without, with_)]
        cpu = [median([one.cpu_s for one in samples]) / gigabytes for samples in (with_, without)]
        rows.append([path, *rates, f"{fine(share)}×", fine(cpu[0]), fine(cpu[0] - cpu[1])])
    report.tell("What verification costs", rows)
    print(f"\nThe claim {'holds' if worst >= AIM else 'does not hold'}: {1 - worst:.0%} of the throughput.")


@contextlib.contextmanager
def _both(store: str, files: Files, env: dict[str, str]) -> Iterator[dict[str, ours.Node]]:
    with (
        ours.node(store, files.size_bytes, env=env) as verified,
        ours.node(store, files.size_bytes, verify=False, env=env) as unverified,
    ):
        yield {"verified": verified, "unverified": unverified}


def _fill(node: ours.Node, files: Files, *, cold: bool) -> Sample:
    node.forget()
    if cold:
        chill(files.parts)
    return node.fill(files.checkpoint)


def candidates(report: Report, options: Options) -> None:
    with contextlib.ExitStack() as stack:
        checksums = stack.enter_context(_checksums())
        size = QUICK_BYTES if options.quick else MEMORY_BYTES
        memory = stack.enter_context(prefaulted(size))
        np.frombuffer(memory, np.uint64)[:] = np.random.SFC64(0).random_raw(size // 8)
        chunks = [memory[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
        found: dict[str, dict[str, list[float]]] = {name: {"cache": [], "memory": []} for name in checksums}
        for _ in range(options.rounds):
            for name, checksum in checksums.items():
                found[name]["cache"].append(_bytes_per_s(checksum, chunks[:1] * CACHED_TURNS) / 1e9)
                found[name]["memory"].append(_bytes_per_s(checksum, chunks) / 1e9)
        for chunk in chunks:
            chunk.release()
    report.samples["candidates"] = found
    rows = [[f"one thread, {CHUNK_BYTES >> 20} MiB at a time, GB/s", "in the cache", "out of memory"]]
    ordered = sorted(found.items(), key=lambda item: -median(item[1]["memory"]))
    rows += [[name, spread(rates["cache"]), spread(rates["memory"])] for name, rates in ordered]
    report.tell("Candidates", rows)


def background(report: Report, options: Options) -> None:
    size = QUICK_BYTES if options.quick else MEMORY_BYTES
    found: dict[str, list[tuple[float, float]]] = {"with digests": [], "without": []}
    with tempfile.TemporaryDirectory(prefix="fs-bench-", dir=disk_folder()) as folder:
        store, data = Store(Path(folder)), np.random.SFC64(0).random_raw(size // 8).tobytes()
        checkpoints = {
            name: store.put_checkpoint(data, chunk_bytes=CHUNK_BYTES, digests=name == "with digests") for name in found
        }
        for round_ in range(options.rounds):
            for name in sorted(found, reverse=bool(round_ % 2)):
                found[name].append(asyncio.run(_fill_and_check(Path(folder), checkpoints[name], size)))
    report.samples["digests"] = found
    with_, without = found["with digests"], found["without"]
    share = median([b[0] / a[0] for a, b in zip(with_, without, strict=True)])
    rates = spread([size / check_s / 1e9 for _, check_s in with_])
    rows = [["a folder into a segment", "fill with / without", "check in the background, GB/s"]]
    rows += [[f"{size >> 20} MiB", f"{fine(share)}×", rates]]
    report.tell("Digests in the background", rows)


async def _fill_and_check(folder: Path, checkpoint: CheckpointId, size_bytes: int) -> tuple[float, float]:
    """Seconds until all chunks are there, and from then on until their digests are checked; 0 without digests."""
    segments = SegmentStore(
        source=FolderSource(folder), memory_bytes=2 * size_bytes, workers_bytes=lambda: 0, threads=0
    )
    try:
        began_s = time.perf_counter()
        segment = await segments.acquire(checkpoint, WorkerId("worker"))
        await segment.filled.wait()
        filled_s = time.perf_counter()
        if segment.manifest is not None and segment.manifest.digests:
            await segment.verified.wait()
        assert segment.error is None
        return filled_s - began_s, time.perf_counter() - filled_s
    finally:
        await segments.close()


@contextlib.contextmanager
def _checksums() -> Iterator[dict[str, Checksum]]:
    yield {
        "xxh3-64, ours": native.xxh3,
        "xxh3-64": xxhash.xxh3_64_intdigest,
        "xxh64": xxhash.xxh64_intdigest,
        **_crc32c(),
        "crc32 (zlib)": zlib.crc32,
        "sha256": lambda data: hashlib.sha256(data).digest(),
        "blake2b": lambda data: hashlib.blake2b(data).digest(),
    }


def _crc32c() -> dict[str, Checksum]:
    """CRC-32C by the processor's instruction; none on other processors than Intel's and AMD's."""
    if platform.machine() != "x86_64":
        return {}
    loaded = compiled(Path(__file__).with_name("crc32c.c"), "-msse4.2")
    found: dict[str, Checksum] = {}
    for name, function in (("crc32c, one lane", loaded.one_lane), ("crc32c, three lanes", loaded.three_lanes)):
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64

        def checksum(data: memoryview, function: Any = function) -> int:
            return int(function(np.frombuffer(data, np.uint8).ctypes.data, len(data)))

        found[name] = checksum
    return found


def _bytes_per_s(checksum: Checksum, chunks: list[memoryview]) -> float:
    began_s = time.perf_counter()
    for chunk in chunks:
        checksum(chunk)
    return sum(map(len, chunks)) / (time.perf_counter() - began_s)
