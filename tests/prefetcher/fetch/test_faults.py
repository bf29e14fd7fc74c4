"""Fetches under attack and fault: the right bytes, or one clear error to every waiter; nothing is leaked."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fleetstart import native
from fleetstart.prefetcher.fetch import fetcher
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources import s3
from fleetstart.prefetcher.sources.s3 import S3Source
from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch, FleetError, StoreFailed, Unavailable
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.prefetcher.faulty_s3 import (
    Fault,
    FaultyS3,
    Handler,
    answers_200,
    closes_after_it,
    ends_after,
    flips_a_bit,
    gives_another_range,
    lies_about_its_length,
    resets_after,
    right,
    says,
    stalls_after,
    talks_nonsense,
    trickles,
)
from tests.prefetcher.nodes import CHUNK_BYTES, Node, Store, call, spec_of
from tests.servers import RedisServer, wait_until

CHUNKS = 24
WAITERS = 5
FAULTS: dict[str, Fault] = {
    "stalls": stalls_after(100),
    "resets": resets_after(100),
    "resets at once": resets_after(0),
    "ends early": ends_after(100),
    "answers 200": answers_200,
    "answers 500": says(500),
    "answers 403": says(403),
    "gives another range": gives_another_range,
    "lies about its length": lies_about_its_length,
    "flips a bit": flips_a_bit,
    "talks nonsense": talks_nonsense,
}


@pytest.fixture
def faulty(store: Store, aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    server = FaultyS3(store.folder.parent)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(s3, "STALL_S", 0.25)
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(fetcher, "RETRY_DELAYS_S", (0.01, 0.02, 0.05))
    yield server
    server.close()


def fill(checkpoint: CheckpointId, size_bytes: int) -> tuple[list[str], FleetError | None, bytes]:
    """The error of each of several waiters (None if all chunks came), the segment's error, the bytes that a worker
    reads."""
    told: list[str] = []
    result: list[tuple[FleetError | None, bytes]] = []

    def wait(control: native.ControlBlock) -> str:
        try:
            control.wait(0, control.chunk_count - 1, 30.0)
        except native.SegmentFailed as failed:
            return str(failed.args[1])
        return ""

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(checkpoint, WorkerId("w-1"))
        attached = native.ControlBlock.attach(os.dup(segment.descriptors()[0]))
        with ThreadPoolExecutor(WAITERS) as team:
            loop = asyncio.get_running_loop()
            waits = [loop.run_in_executor(team, wait, attached) for _ in range(WAITERS)]
            await segment.filled.wait()
            told.extend(await asyncio.gather(*waits))
        result.append((segment.error, b"" if segment.error else reading(segment, size_bytes)))
        segments.release(segment, WorkerId("w-1"))
        if segment.error is not None:
            assert segments.budget.used_bytes == 0
            assert segments.budget.memory.used_bytes == 0, "the failed segment's memory came back"

    async def main() -> None:
        segments = SegmentStore(
            source=S3Source(bucket="weights"), memory_bytes=1 << 28, workers_bytes=lambda: 0, threads=4
        )
        try:
            async with asyncio.timeout(60):
                await scenario(segments)
        finally:
            await segments.close()

    asyncio.run(main())
    wait_until(lambda: not any(thread.name.startswith("store-") for thread in threading.enumerate()))
    return told, *result[0]


def reading(segment: Segment, size_bytes: int) -> bytes:
    fds = [os.dup(fd) for fd in segment.descriptors()[1:]]
    return bytes(native.Region.attach(fds, size_bytes).view(0, size_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_store_that_breaks_now_and_then_gives_the_right_bytes(faulty: FaultyS3, store: Store, name: str) -> None:
    data = os.urandom(CHUNKS * CHUNK_BYTES)
    # The same chunk damaged twice would be damaged in the store.
    faulty.faults = [FAULTS[name]] * (1 if name == "flips a bit" else 2)

    told, error, found = fill(store.put_checkpoint(data), len(data))

    assert error is None
    assert told == [""] * WAITERS
    assert found == data
    assert not faulty.faults


def test_a_store_that_closes_after_an_answer_gives_everything(faulty: FaultyS3, store: Store) -> None:
    data = os.urandom(CHUNKS * CHUNK_BYTES)
    faulty.always = closes_after_it

    told, error, found = fill(store.put_checkpoint(data), len(data))

    assert error is None
    assert told == [""] * WAITERS
    assert found == data


def test_a_node_without_a_thread_left_says_so_to_every_waiter(
    faulty: FaultyS3, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(CHUNKS * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    start = threading.Thread.start

    def starts_two(thread: threading.Thread) -> None:
        if thread.name.startswith("store-") and thread.name.endswith("-2"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts_two)

    told, error, _ = fill(checkpoint, len(data))

    assert isinstance(error, Unavailable)
    assert "no more threads" in error.message
    assert all("no more threads" in words for words in told)
    assert len(told) == WAITERS


@pytest.mark.parametrize("fault", [stalls_after(CHUNK_BYTES + 100), ends_after(CHUNK_BYTES + 100)])
def test_a_store_that_gives_a_little_each_time_gives_everything_in_the_end(
    faulty: FaultyS3, store: Store, fault: Fault
) -> None:
    data = os.urandom(CHUNKS * CHUNK_BYTES)
    faulty.always = fault

    told, error, found = fill(store.put_checkpoint(data), len(data))

    assert error is None
    assert told == [""] * WAITERS
    assert found == data


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_store_that_stays_broken_is_one_clear_error_to_every_waiter(
    faulty: FaultyS3, store: Store, name: str
) -> None:
    data = os.urandom(CHUNKS * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    faulty.always = FAULTS[name]

    told, error, _ = fill(checkpoint, len(data))

    assert isinstance(error, ChecksumMismatch if name == "flips a bit" else StoreFailed)
    assert told == [error.message] * WAITERS
    assert checkpoint[:12] in error.message
    assert error.hint


def replaced(content: Callable[[bytes], bytes]) -> Fault:
    """A fault: from this range on, the object is another one."""

    def fault(handler: Handler, data: bytes, begin: int, end: int) -> None:
        other = content(data)
        path = handler.server.root / handler.path.partition("?")[0].lstrip("/")
        path.with_suffix(".new").write_bytes(other)
        path.with_suffix(".new").replace(path)
        if end > len(other):
            handler.answer(416, b"", {"Content-Range": f"bytes */{len(other)}"})
            return
        handler.begin(other, begin, end)
        handler.wfile.write(other[begin:end])

    return fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (lambda data: data[:-1000], CheckpointInvalid, "truncated"),
        (lambda data: data + b"more", CheckpointInvalid, "another one"),
        (lambda data: bytes(len(data)), ChecksumMismatch, "checksum"),
    ],
    ids=["truncated", "extended", "replaced"],
)
def test_an_object_that_changes_while_it_is_fetched_is_an_error(
    faulty: FaultyS3, store: Store, content: Callable[[bytes], bytes], kind: type[FleetError], message: str
) -> None:
    data = os.urandom(CHUNKS * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data)
    faulty.faults = [FAULTS["resets at once"], replaced(content)]

    told, error, _ = fill(checkpoint, len(data))

    assert isinstance(error, kind)
    assert message in error.message
    assert told == [error.message] * WAITERS


def test_a_daemon_that_is_killed_while_it_fetches_leaves_nothing_and_its_successor_goes_on(
    redis_server: RedisServer, store: Store, faulty: FaultyS3, tmp_path: Path
) -> None:
    reads = "def hello():\n    return 'here'\n"
    bundle = store.put_bundle({"handler.py": reads})
    data = os.urandom(64 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data, os.urandom(CHUNK_BYTES))
    env = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    node = Node(redis_server, "s3://weights", tmp_path / "home", **env)
    try:
        node.start()
        faulty.always = trickles
        node.order(spec_of(bundle, weights=checkpoint))
        wait_until(lambda: any(s.ready_bytes for s in node.lease().segments), what="a first chunk")
        image = tmp_path / "home" / "node" / "checkpoints" / checkpoint / "segment"
        wait_until(lambda: image.stat().st_blocks > 0, what="a chunk on the disk")
        processes = node.descendants()

        node.kill()

        psutil.wait_procs(processes, timeout=10)
        assert not any(process.is_running() for process in processes)
        faulty.always = right
        faulty.ranges.clear()
        node.start()
        status = node.wait_for(node.order(spec_of(bundle, weights=checkpoint), version=2), "ready")
        assert call(status) == (200, b'"here"')
        wait_until(lambda: all(s.state == "ready" for s in node.lease().segments), what="all chunks")
        asked = sum(end - begin for begin, end in faulty.ranges)
        assert asked < len(data), "what was on the disk already was not fetched again"
    finally:
        node.close()
