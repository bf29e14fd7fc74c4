"""Waiting on a control block, in one process and between several: who is woken, when, and by what."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import xxhash

from fleetstart.native import ControlBlock, SegmentFailed, SlabPool
from tests.native.neighbours import PATIENCE_S, Child, Start, attached, hear, threads_never_switched, until

FUTEX_CALL = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


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
    """Number of the process's threads that sleep in a futex wait of ours: operation 0, not private as Python's are."""
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
from fleetstart.native import ControlBlock, Region, SegmentFailed, xxh3
control = ControlBlock.attach(int(sys.argv[1]))
size = 16 * 1024
region = Region.attach([int(fd) for fd in sys.argv[2:]], size * control.chunk_count)
sums = control.manifest.decode().split()
print("waiting")
for chunk in range(control.chunk_count):
    control.wait(chunk, chunk, 60)
    found = xxh3(region.view(chunk * size, size))
    if str(found) != sums[chunk]:
        print("chunk", chunk, "was published before its bytes were")
        break
else:
    print(control.state)
"""


def test_bytes_are_there_when_their_chunk_is_ready(start: Start) -> None:
    size, count = 16 * 1024, 600
    chunks = [os.urandom(size) for _ in range(count)]
    manifest = " ".join(str(xxhash.xxh3_64_intdigest(chunk)) for chunk in chunks).encode()
    control = ControlBlock.create("handover", count, manifest, 1)
    region = SlabPool("handover-data", pages="small", slab_bytes=64 * size, capacity=10).take(size * count)
    children = [start(WAIT_FOR_EACH, control.fd, *region.fds) for _ in range(2)]
    assert [hear(child) for child in children] == ["waiting"] * 2
    for index, chunk in enumerate(chunks):
        region.view(index * size, size)[:] = chunk
        control.mark_ready(index)
    assert [hear(child) for child in children] == ["ready"] * 2


WAIT_ONCE = """
import signal, sys
from fleetstart.native import ControlBlock, SegmentFailed
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background ignores it, as shells do
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
