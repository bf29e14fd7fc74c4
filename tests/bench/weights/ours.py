"""Our side of the benchmarks: publishes a checkpoint, and runs a node that holds segments and serves workers.

The one place that knows how segments are made. `node` starts a process, which is this module: commands come on its
input, workers connect to a socket beside it and get descriptors, as the daemon gives them.

A warm pool has its memory made and cleared before any clock starts, as a node has in service; what clearing it after a
checkpoint costs is told by `forget`. Unverified, bytes are read by the same threads in the same ranges, and not summed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetstart import native
from fleetstart.controller.cli.weights.publish import publish as publish_checkpoint
from fleetstart.prefetcher.config import default_fetch_threads
from fleetstart.prefetcher.segments import opener
from fleetstart.prefetcher.segments.slab_memory import slab_size
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.factory import open_source
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.object_keys import checkpoint_key
from fleetstart.runtime.contract.weights.manifest import Manifest, chunk_ranges
from tests.bench.harness.compiled import compiled
from tests.bench.peers.process import Talk
from tests.bench.weights.descriptors import FILES_MAX, MESSAGE_MAX
from tests.bench.weights.loaders import Sample, module

THREADS = default_fetch_threads(os.cpu_count() or 1)
MEMORY_SHARE = 0.8
"""Of the machine's, as a node takes by default: it decides how large the pool's slabs are."""
TIMEOUT_S = 300.0
POLL_S = 0.01

Value = TypeVar("Value")


# ── a checkpoint ───────────────────────────────────────────────────────────────────────────────────


def publish(source: Path, store: Path, cache: Path) -> tuple[CheckpointId, list[Path]]:
    """Writes the checkpoint into a folder laid out as a bucket; its id, and its parts in order."""
    published = publish_checkpoint(source, _Folder(store), cache=cache, progress=lambda *_: None)
    return published.id, sorted((store / checkpoint_key(published.id, "")).glob("*.safetensors"))


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def object_size(self, key: str) -> int | None:
        path = self._root / key
        return path.stat().st_size if path.exists() else None

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for block in [content] if isinstance(content, bytes) else content:
                file.write(block)
            os.fsync(file.fileno())

    def begin_upload(self, manifest: bytes) -> None:
        return


# ── a node, seen from the benchmark ────────────────────────────────────────────────────────────────


class Node:
    def __init__(self, talk: Talk, place: Path) -> None:
        self._talk = talk
        self.socket = place

    def fill(self, checkpoint: str) -> Sample:
        """The checkpoint into a segment, whole and verified."""
        answer = self._ask("fill", checkpoint)
        return Sample(answer["ready_s"], answer["cpu_s"])

    def forget(self) -> float:
        """Every segment goes, and a warm pool's memory is clear again when this returns; CPU seconds for that."""
        return float(self._ask("forget")["cpu_s"])

    def cpu_s(self) -> float:
        return float(self._ask("cpu")["cpu_s"])

    def facts(self) -> Any:
        return self._ask("facts")

    @property
    def pid(self) -> int:
        return int(self._talk.about["pid"])

    def _ask(self, do: str, checkpoint: str = "") -> Any:
        answer = self._talk.ask(do=do, checkpoint=checkpoint)
        if "error" in answer:
            raise RuntimeError(f"node, {do}: {answer['error']}")
        return answer


@contextlib.contextmanager
def node(
    store: str,
    size_bytes: int,
    *,
    pool: str = "warm",
    verify: bool = True,
    env: Mapping[str, str] | None = None,
    entered: Callable[[Sequence[str]], Sequence[str]] = tuple,
) -> Iterator[Node]:
    """A node with memory for one checkpoint of that size. `store` is as in FS_STORE. A cold pool has no memory yet."""
    with tempfile.TemporaryDirectory(prefix="fs-bench-") as folder:
        place = Path(folder) / "node.sock"
        options = ["--store", store, "--socket", str(place), "--size-bytes", str(size_bytes), "--pool", pool]
        with module(__name__, *options, *([] if verify else ["--unverified"]), env=env, entered=entered) as talk:
            yield Node(talk, place)


# ── the node itself ────────────────────────────────────────────────────────────────────────────────


class _Serving:
    """Segments on an event loop in a thread of its own; commands and workers from other threads."""

    def __init__(self, *, store: str, size_bytes: int, warm: bool) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._workers = 0
        budget = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MEMORY_SHARE)
        slab = slab_size(budget)
        needed = (-(-size_bytes // slab) + 1) * slab
        self._keep_slabs = needed // slab if warm else 0
        source = open_source(store)

        async def make() -> SegmentStore:
            # Workers are promised the rest: no memory is made beside that of the one checkpoint.
            return SegmentStore(
                source=source,
                memory_bytes=budget,
                workers_bytes=lambda: budget - needed,
                threads=THREADS,
                keep_bytes=needed if warm else 0,
            )

        self._segments = self._run(make())
        self._wait_clear()

    def serve_workers(self, listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            threading.Thread(target=self._serve_worker, args=(link,), daemon=True).start()

    def answer(self, do: str, checkpoint: str) -> Any:
        used_s, began_s = time.process_time(), time.perf_counter()
        if do == "fill":
            segment, worker = self._acquire(checkpoint)
            self._run(segment.filled.wait())
            answer = {"ready_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - used_s}
            self._release(segment, worker)
            if segment.error is not None:
                raise segment.error
            return answer
        if do == "forget":
            self._run(self._evict_all())
            self._wait_clear()
            return {"cpu_s": time.process_time() - used_s}
        if do == "facts":
            report = self._segments.budget.memory.report()
            return {
                "pages": report.pages,
                "slab_bytes": report.slab_bytes,
                "threads": THREADS,
                "refused": report.refused,
            }
        return {"cpu_s": time.process_time()}

    async def _evict_all(self) -> None:
        """Evicts all segments once no worker is left: the node hears of their ends a moment later."""
        ends_s = time.monotonic() + TIMEOUT_S
        segments = self._segments
        while any(held.pinned for held in segments.budget._candidates()):
            if time.monotonic() > ends_s:
                raise TimeoutError("a worker still has its segment")
            await asyncio.sleep(POLL_S)
        if segments.budget.used_bytes:
            segments.budget.reserve(segments.budget._memory_bytes - segments.budget._workers_bytes(), "the benchmark")

    def _wait_clear(self) -> None:
        """Waits until the pool has made or cleared the memory that it keeps."""
        ends_s = time.monotonic() + TIMEOUT_S
        pool = self._segments.budget.memory._pool
        while pool.used or pool.clean < self._keep_slabs:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the pool keeps {pool.clean} of {self._keep_slabs} slabs")
            time.sleep(POLL_S)

    def _acquire(self, checkpoint: str) -> tuple[Segment, WorkerId]:
        self._workers += 1
        worker = WorkerId(f"w-{self._workers}")
        return self._run(self._segments.acquire(CheckpointId(checkpoint), worker)), worker

    def _release(self, segment: Segment, worker: WorkerId) -> None:
        self._loop.call_soon_threadsafe(self._segments.release, segment, worker)

    def _serve_worker(self, link: socket.socket) -> None:
        with link:
            try:
                segment, worker = self._acquire(link.recv(MESSAGE_MAX).decode())
            except Exception as error:
                link.sendall(str(error).encode())
                return
            descriptors = segment.descriptors()
            while len(descriptors) > FILES_MAX:
                socket.send_fds(link, [b"more"], descriptors[:FILES_MAX])
                descriptors = descriptors[FILES_MAX:]
            socket.send_fds(link, [b"all"], descriptors)
            link.recv(1)  # until it ends
            self._release(segment, worker)

    def _run(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


def _leave_out_checksums() -> None:
    """Every checksum is 0, and is expected to be."""

    def read(fd: int, offset: int, into: Any, size_bytes: int | None = None) -> int:
        wanted, done = size_bytes or len(into), 0
        while done < wanted:
            count = os.preadv(fd, [into[done:]], offset + done)
            if not count:
                raise EOFError(f"{done} bytes of {wanted}")
            done += count
        return 0

    def ranges(manifest: Manifest) -> Any:
        return [msgspec.structs.replace(chunk, checksum=0) for chunk in chunk_ranges(manifest)]

    library = compiled(Path(__file__).with_name("receive.c"))
    library.receive.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.receive.restype = ctypes.c_long

    class Nothing:
        def __init__(self, data: Any) -> None:
            self._size = len(data)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(data)) if self._size else 0

        def advance(self, ready_bytes: int) -> None: ...

        def receive(self, fd: int, begin: int, slice_s: float) -> int:
            done: int = library.receive(fd, self._address, begin, self._size)
            if done < 0:
                raise OSError(-done, os.strerror(-done))
            if done == begin:
                raise EOFError
            return done

        def digest(self) -> int:
            return 0

    patched: Any = native
    patched.read_direct = patched.read_checksum = read
    patched.Checksum = Nothing
    patched.xxh3 = lambda data: 0
    patched = opener
    patched.chunk_ranges = ranges


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--pool", choices=("warm", "cold"), required=True)
    parser.add_argument("--unverified", action="store_true")
    options = parser.parse_args()
    if options.unverified:
        _leave_out_checksums()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(options.socket)
        listener.listen()
        serving = _Serving(store=options.store, size_bytes=options.size_bytes, warm=options.pool == "warm")
        threading.Thread(target=serving.serve_workers, args=(listener,), daemon=True).start()
        print(json.dumps({"pid": os.getpid()}), flush=True)
        for line in sys.stdin:
            try:
                answer = serving.answer(**json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
