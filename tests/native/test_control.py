"""Control blocks: what is published, who is woken, and that a broken one is an error and nothing worse."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.native import ControlBlock, NativeError, Region, SegmentFailed, copy_checksum
from tests.native.neighbours import (
    PATIENCE_S,
    SEALS,
    Child,
    Start,
    hear,
    memory_with,
    open_descriptors,
    threads_never_switched,
    until,
)

PAGE = mmap.PAGESIZE
FUTEX_CALL = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


def attached(block: ControlBlock) -> ControlBlock:
    return ControlBlock.attach(os.dup(block.fd))


def content_of(block: ControlBlock) -> bytes:
    return os.pread(block.fd, os.fstat(block.fd).st_size, 0)


# ── what it says ───────────────────────────────────────────────────────────────────────────────────


def test_a_new_block_is_filling_and_says_what_it_was_given() -> None:
    owner = ControlBlock.create("new", 130, b"the manifest", 2**64 - 1)
    for block in (owner, attached(owner)):
        assert (block.manifest, block.generation, block.chunk_count) == (b"the manifest", 2**64 - 1, 130)
        assert (block.state, block.ready_count, block.error) == ("filling", 0, None)
        assert not any(block.is_ready(chunk) for chunk in range(130))


@given(st.integers(1, 300).flatmap(lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count - 1)))))
def test_readers_see_exactly_the_chunks_that_were_marked_each_counted_once(case: tuple[int, list[int]]) -> None:
    count, marks = case
    owner = ControlBlock.create("marks", count, b"", 0)
    reader = attached(owner)
    seen: set[int] = set()
    for chunk in marks:
        assert owner.mark_ready(chunk) == (chunk not in seen)
        seen.add(chunk)
        assert reader.ready_count == len(seen)
    assert {chunk for chunk in range(count) if reader.is_ready(chunk)} == seen
    assert reader.state == ("ready" if len(seen) == count else "filling")


@given(st.integers(1, 200), st.data())
def test_a_range_is_ready_when_each_of_its_chunks_is(count: int, data: st.DataObject) -> None:
    ready = data.draw(st.sets(st.integers(0, count - 1)))
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    owner = ControlBlock.create("ranges", count, b"", 0)
    for chunk in ready | set(data.draw(st.sampled_from([(), range(first, last + 1)]))):
        owner.mark_ready(chunk)
        ready.add(chunk)
    if ready >= set(range(first, last + 1)):
        attached(owner).wait(first, last, 0)
    else:
        with pytest.raises(TimeoutError, match=f"{len(ready)} of {count} chunks are"):
            attached(owner).wait(first, last, 0)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 1000])
def test_the_last_chunk_makes_it_ready(count: int) -> None:
    owner = ControlBlock.create("last", count, b"m", 0)
    for chunk in reversed(range(count)):
        assert owner.state == "filling"
        owner.mark_ready(chunk)
    assert (owner.state, owner.ready_count) == ("ready", count)
    attached(owner).wait(0, count - 1, 0)


def test_a_segment_without_chunks_is_ready_from_the_start() -> None:
    owner = ControlBlock.create("none", 0, b"manifest", 0)
    assert (owner.state, attached(owner).manifest) == ("ready", b"manifest")
    with pytest.raises(IndexError):
        owner.wait(0, 0, 0)


@given(st.binary(max_size=5000))
def test_the_manifest_comes_back_as_it_was(manifest: bytes) -> None:
    assert attached(ControlBlock.create("manifest", 77, manifest, 1)).manifest == manifest


# ── failing ────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_reaches_readers_with_its_reason_and_is_final() -> None:
    owner = ControlBlock.create("failed", 3, b"", 0)
    reader = attached(owner)
    owner.mark_ready(0)
    assert owner.fail("checksum_mismatch", "chunk 1 of llama: wanted aa, got bb")
    assert not owner.fail("other", "a later reason")
    assert (reader.state, reader.error) == ("failed", ("checksum_mismatch", "chunk 1 of llama: wanted aa, got bb"))
    with pytest.raises(SegmentFailed) as raised:
        reader.wait(0, 1, 60)
    assert raised.value.args == ("checksum_mismatch", "chunk 1 of llama: wanted aa, got bb")
    assert isinstance(raised.value, NativeError)
    reader.wait(0, 0, 0)  # verified is verified
    owner.mark_ready(1)
    owner.mark_ready(2)
    assert reader.state == "failed"


def test_what_is_ready_does_not_fail_any_more() -> None:
    owner = ControlBlock.create("done", 1, b"", 0)
    owner.mark_ready(0)
    assert not owner.fail("late", "too late")
    assert (owner.state, owner.error) == ("ready", None)


@given(st.text(max_size=100), st.text(max_size=3000))
def test_reasons_are_cut_to_whole_characters(code: str, message: str) -> None:
    owner = ControlBlock.create("texts", 1, b"", 0)
    owner.fail(code, message)
    error = attached(owner).error
    assert error is not None
    assert code.startswith(error[0])
    assert message.startswith(error[1])
    assert len(error[0].encode()) > min(len(code.encode()), 64) - 4
    assert len(error[1].encode()) > min(len(message.encode()), 2048) - 4


# ── only the owner writes ──────────────────────────────────────────────────────────────────────────


def test_a_reader_cannot_write() -> None:
    owner = ControlBlock.create("mine", 2, b"", 0)
    reader = attached(owner)
    with pytest.raises(NativeError, match="only the owner"):
        reader.mark_ready(0)
    with pytest.raises(NativeError, match="only the owner"):
        reader.fail("code", "message")
    with pytest.raises(PermissionError):
        mmap.mmap(reader.fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(reader.fd, b"\xff", PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(reader.fd, 0)
    assert (owner.state, owner.ready_count) == ("filling", 0)


@pytest.mark.parametrize("chunk", [2, 63, 64, 2**32, 2**64 - 1, 2**64, -1])
def test_chunks_outside_are_index_errors(chunk: int) -> None:
    block = ControlBlock.create("outside", 2, b"", 0)
    for call in (block.mark_ready, block.is_ready, lambda at: block.wait(at, at, 0), lambda at: block.wait(0, at, 0)):
        with pytest.raises(IndexError):
            call(chunk)
    with pytest.raises(IndexError):
        block.wait(1, 0, 0)
    assert block.ready_count == 0


@pytest.mark.parametrize(("chunk_count", "error"), [(2**32 + 1, ValueError), (2**64, TypeError), (-1, TypeError)])
def test_counts_that_cannot_be_are_refused(chunk_count: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        ControlBlock.create("many", chunk_count, b"", 0)


# ── waiting, in one process ────────────────────────────────────────────────────────────────────────


def in_threads(count: int, work: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE_S)
    return not any(thread.is_alive() for thread in threads)


def asleep_in_futex_wait(pid: int) -> int:
    """How many threads of the process sleep in a futex wait of ours: operation 0, not private as Python's are."""
    count = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/syscall") as file:
                fields = file.read().split()
        except OSError:
            continue
        count += len(fields) > 2 and fields[0] == FUTEX_CALL and fields[2] == "0x0"
    return count


def test_waiters_on_many_chunks_each_return_when_theirs_are_ready() -> None:
    owner = ControlBlock.create("many", 64, b"", 0)
    reader = attached(owner)
    done: set[int] = set()

    def work(index: int) -> None:
        reader.wait(index * 2, index * 2 + 1, PATIENCE_S * 2)
        done.add(index)

    threads = in_threads(32, work)
    assert until(lambda: asleep_in_futex_wait(os.getpid()) == 32)
    owner.mark_ready(10)
    assert not done
    owner.mark_ready(11)
    assert until(lambda: done == {5})
    assert until(lambda: asleep_in_futex_wait(os.getpid()) == 31)
    for chunk in range(64):
        owner.mark_ready(chunk)
    assert join(threads)
    assert done == set(range(32))


def test_a_failure_wakes_every_waiter() -> None:
    owner = ControlBlock.create("all", 8, b"", 0)
    reasons: list[tuple[object, ...]] = []

    def work(index: int) -> None:
        try:
            attached(owner).wait(0, index % 8, PATIENCE_S * 2)
        except SegmentFailed as error:
            reasons.append(error.args)

    threads = in_threads(24, work)
    assert until(lambda: asleep_in_futex_wait(os.getpid()) == 24)
    owner.fail("store_error", "the store is gone")
    assert join(threads)
    assert reasons == [("store_error", "the store is gone")] * 24


def test_marking_from_many_threads_counts_each_chunk_once() -> None:
    owner = ControlBlock.create("race", 500, b"", 0)
    first = [0] * 8

    def work(index: int) -> None:
        first[index] = sum(owner.mark_ready(chunk) for chunk in range(500))

    assert join(in_threads(8, work))
    assert (sum(first), owner.ready_count, owner.state) == (500, 500, "ready")


def test_a_wait_ends_at_its_deadline_and_says_what_is_missing() -> None:
    block = ControlBlock.create("deadline", 5, b"", 0)
    block.mark_ready(1)
    began, used = time.monotonic(), time.thread_time()
    with pytest.raises(TimeoutError, match=r"chunks 1 to 4 not ready after 1\.2\d* s; 1 of 5 chunks are"):
        block.wait(1, 4, 1.2)
    elapsed = time.monotonic() - began
    assert elapsed >= 1.2
    assert time.thread_time() - used < elapsed / 10, "it must sleep, not spin"


@pytest.mark.parametrize("timeout_s", [0, -1, -1e300])
def test_a_deadline_that_has_passed_asks_and_does_not_wait(timeout_s: float) -> None:
    block = ControlBlock.create("now", 1, b"", 0)
    with pytest.raises(TimeoutError):
        block.wait(0, 0, timeout_s)
    block.mark_ready(0)
    block.wait(0, 0, timeout_s)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), float("-inf")])
def test_a_wait_without_an_end_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="every wait ends"):
        ControlBlock.create("forever", 1, b"", 0).wait(0, 0, timeout_s)


def test_waiting_lets_other_threads_run_and_so_lets_them_mark() -> None:
    owner = ControlBlock.create("gil", 1, b"", 0)
    go = threading.Event()

    def work(_: int) -> None:
        go.wait()
        owner.mark_ready(0)

    threads = in_threads(1, work)
    with threads_never_switched():
        go.set()
        owner.wait(0, 0, PATIENCE_S)
    assert join(threads)


# ── waiting, between processes ─────────────────────────────────────────────────────────────────────

WAIT_FOR_EACH = """
import sys
from fleetstart.native import ControlBlock, Region, SegmentFailed, xxh64
control, region = ControlBlock.attach(int(sys.argv[1])), Region.attach(int(sys.argv[2]))
size = region.size_bytes // control.chunk_count
sums = control.manifest.decode().split()
print("waiting")
for chunk in range(control.chunk_count):
    control.wait(chunk, chunk, 60)
    found = xxh64(region.view(chunk * size, size))
    if str(found) != sums[chunk]:
        print("chunk", chunk, "was published before its bytes were")
        break
else:
    print(control.state)
"""


def test_bytes_are_there_when_their_chunk_is_ready(start: Start) -> None:
    size, count = 16 * 1024, 600
    chunks = [os.urandom(size) for _ in range(count)]
    manifest = " ".join(str(xxhash.xxh64_intdigest(chunk)) for chunk in chunks).encode()
    control = ControlBlock.create("handover", count, manifest, 1)
    region = Region.create("handover-data", size * count)
    children = [start(WAIT_FOR_EACH, control.fd, region.fd) for _ in range(2)]
    assert [hear(child) for child in children] == ["waiting"] * 2
    for index, chunk in enumerate(chunks):
        copy_checksum(region.view(index * size, size), chunk)
        control.mark_ready(index)
    assert [hear(child) for child in children] == ["ready"] * 2


WAIT_ONCE = """
import signal, sys
from fleetstart.native import ControlBlock, SegmentFailed
control = ControlBlock.attach(int(sys.argv[1]))
print("waiting")
try:
    control.wait(0, control.chunk_count - 1, 60)
    print("ready")
except SegmentFailed as error:
    print(*error.args, sep=": ")
except KeyboardInterrupt:
    print("interrupted")
"""


def asleep(child: Child) -> Callable[[], bool]:
    return lambda: asleep_in_futex_wait(child.pid) == 1


def test_other_processes_are_woken_by_success_and_by_failure(start: Start) -> None:
    good, bad = ControlBlock.create("good", 2, b"", 0), ControlBlock.create("bad", 2, b"", 0)
    lucky, unlucky = [start(WAIT_ONCE, good.fd) for _ in range(2)], [start(WAIT_ONCE, bad.fd) for _ in range(2)]
    assert all(hear(child) == "waiting" for child in lucky + unlucky)
    assert all(until(asleep(child)) for child in lucky + unlucky)
    bad.fail("store_error", "no route")
    assert [hear(child) for child in unlucky] == ["store_error: no route"] * 2
    assert all(until(asleep(child)) for child in lucky)
    good.mark_ready(1)
    good.mark_ready(0)
    assert [hear(child) for child in lucky] == ["ready"] * 2


def test_a_wait_can_be_interrupted(start: Start) -> None:
    control = ControlBlock.create("ctrl-c", 1, b"", 0)
    child = start(WAIT_ONCE, control.fd)
    assert hear(child) == "waiting"
    assert until(asleep(child))
    child.send_signal(signal.SIGINT)
    assert hear(child) == "interrupted"


HANDLE_AND_GO_ON = """
import signal, sys
from fleetstart.native import ControlBlock
control = ControlBlock.attach(int(sys.argv[1]))
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
print("waiting")
control.wait(0, 0, 60)
print("ready")
"""


def test_a_signal_whose_handler_returns_does_not_end_the_wait(start: Start) -> None:
    control = ControlBlock.create("usr1", 1, b"", 0)
    child = start(HANDLE_AND_GO_ON, control.fd)
    assert hear(child) == "waiting"
    for _ in range(3):
        assert until(asleep(child))
        child.send_signal(signal.SIGUSR1)
        assert hear(child) == "handled"
    control.mark_ready(0)
    assert hear(child) == "ready"


CREATE_AND_DIE = """
import os, socket, sys
from fleetstart.native import ControlBlock
control = ControlBlock.create("mortal", 2, b"left behind", 7)
control.mark_ready(1)
with socket.socket(fileno=int(sys.argv[1])) as out:
    socket.send_fds(out, [b"x"], [control.fd])
    os._exit(0)
"""


def test_a_block_can_be_read_after_its_owner_died(start: Start) -> None:
    ours, theirs = socket.socketpair()
    child = start(CREATE_AND_DIE, theirs.fileno())
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    child.wait(PATIENCE_S)
    ours.close()
    theirs.close()
    reader = ControlBlock.attach(descriptors[0])
    assert (reader.manifest, reader.generation, reader.state) == (b"left behind", 7, "filling")
    assert (reader.is_ready(0), reader.is_ready(1)) == (False, True)
    with pytest.raises(TimeoutError):
        reader.wait(0, 1, 0.01)


# ── broken and hostile blocks ──────────────────────────────────────────────────────────────────────

# Offsets of the header's fields; the format is fixed by its version number.
FIELDS = {"magic": (0, "Q"), "version": (8, "I"), "header_bytes": (12, "I"), "chunk_count": (24, "Q"),
          "manifest_bytes": (32, "Q"), "state": (64, "I")}  # fmt: skip


def altered(field: str, value: int) -> bytes:
    offset, code = FIELDS[field]
    content = bytearray(content_of(ControlBlock.create("template", 100, b"manifest", 1)))
    struct.pack_into(code, content, offset, value)
    return bytes(content)


def test_the_template_of_these_tests_is_whole() -> None:
    block = ControlBlock.attach(memory_with(altered("chunk_count", 100)))
    assert (block.chunk_count, block.manifest) == (100, b"manifest")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("magic", 0, "wrong magic"),
        ("magic", 2**64 - 1, "wrong magic"),
        ("version", 2, "version 2, this is version 1"),
        ("header_bytes", 8192, "version"),
        ("chunk_count", 200, "do not make"),
        ("chunk_count", 0, "do not make"),
        ("chunk_count", 2**64 - 1, "do not make"),
        ("chunk_count", 2**63 + 100, "do not make"),
        ("manifest_bytes", 9, "do not make"),
        ("manifest_bytes", 2**64 - 4096 - 16, "do not make"),
        ("manifest_bytes", 2**64 - 1, "do not make"),
        ("state", 3, "state 3"),
        ("state", 2**32 - 1, "state 4294967295"),
    ],
)
def test_a_header_that_lies_is_refused(field: str, value: int, reason: str) -> None:
    before = open_descriptors()
    with pytest.raises(NativeError, match=reason):
        ControlBlock.attach(memory_with(altered(field, value)))
    assert open_descriptors() == before


def test_counts_that_overflow_into_the_right_size_are_refused() -> None:
    # 2^61 words of bits are 2^64 bytes: nothing, to arithmetic that wraps.
    content = bytearray(content_of(ControlBlock.create("template", 0, b"", 1)))
    struct.pack_into("QQ", content, 24, 2**64 - 1, 2**63)
    with pytest.raises(NativeError, match="do not make"):
        ControlBlock.attach(memory_with(bytes(content)))


def poke(block: ControlBlock) -> None:
    """Everything that a reader can ask; only the documented errors may come."""
    for ask in (
        lambda: (block.manifest, block.generation, block.chunk_count, block.ready_count),
        lambda: block.state,
        lambda: block.error,
        lambda: block.is_ready(max(block.chunk_count, 1) - 1),
        lambda: block.wait(0, max(block.chunk_count, 1) - 1, 0),
    ):
        with contextlib.suppress(NativeError, TimeoutError, IndexError):
            ask()


TEMPLATE = altered("chunk_count", 100)


@given(st.integers(0, len(TEMPLATE)))
def test_a_block_cut_anywhere_is_refused(size: int) -> None:
    if size == len(TEMPLATE):
        ControlBlock.attach(memory_with(TEMPLATE))
        return
    with pytest.raises(NativeError):
        ControlBlock.attach(memory_with(TEMPLATE[:size]))


@given(st.dictionaries(st.integers(0, 200) | st.integers(0, len(TEMPLATE) - 1), st.integers(0, 255), max_size=12))
def test_any_bytes_make_an_error_or_a_block_that_can_be_asked(changes: dict[int, int]) -> None:
    content = bytearray(TEMPLATE)
    for offset, byte in changes.items():
        content[offset] = byte
    try:
        block = ControlBlock.attach(memory_with(bytes(content)))
    except NativeError:
        return
    poke(block)


def test_texts_longer_than_their_fields_and_no_utf8_are_read_within_bounds() -> None:
    owner = ControlBlock.create("template", 100, b"manifest", 1)
    owner.fail("code", "message")
    content = bytearray(content_of(owner))
    at = content.index(b"code")
    struct.pack_into("II", content, at - 8, 2**32 - 1, 2**32 - 1)
    content[at : at + 64] = b"\xff" * 64
    block = ControlBlock.attach(memory_with(bytes(content)))
    assert block.error is not None
    assert block.error[0] == "�" * 64
    assert len(block.error[1]) == 2048
    with pytest.raises(SegmentFailed):
        block.wait(0, 0, 1)


def test_what_was_checked_once_is_what_is_used_whatever_the_owner_writes_later() -> None:
    descriptor = os.memfd_create("shifting", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, TEMPLATE)
    memory = mmap.mmap(descriptor, len(TEMPLATE))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    block = ControlBlock.attach(os.dup(descriptor))
    memory[24:40] = b"\xff" * 16
    assert (block.chunk_count, block.manifest) == (100, b"manifest")
    memory[64:68] = b"\xff" * 4
    poke(block)
    with pytest.raises(NativeError, match="state"):
        block.wait(0, 99, PATIENCE_S)
    memory.close()
    os.close(descriptor)


@pytest.mark.parametrize("seals", [0, SEALS & ~0x2, SEALS & ~0x10], ids=["none", "shrink", "write"])
def test_a_block_that_its_owner_could_pull_away_is_refused(seals: int) -> None:
    before = open_descriptors()
    with pytest.raises(NativeError, match="without the seals"):
        ControlBlock.attach(memory_with(TEMPLATE, seals))
    assert open_descriptors() == before


def test_what_is_no_memfd_is_refused() -> None:
    before = open_descriptors()
    for descriptor in (os.open("/dev/null", os.O_RDWR), -1, 10**6):
        with pytest.raises(NativeError, match="not a control block"):
            ControlBlock.attach(descriptor)
    region = Region.create("data", PAGE)
    with pytest.raises(NativeError, match="wrong magic"):
        ControlBlock.attach(os.dup(region.fd))
    del region
    assert open_descriptors() == before


def test_no_descriptor_leaks() -> None:
    before = open_descriptors()
    for _ in range(300):
        owner = ControlBlock.create("leak", 10, b"manifest", 0)
        assert attached(owner).ready_count == 0
        with pytest.raises(NativeError):
            ControlBlock.attach(memory_with(b"short"))
    del owner
    gc.collect()
    assert open_descriptors() == before
