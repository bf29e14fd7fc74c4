"""Findings of the reader's guest about hostile ends: a holder that lies, a reader that reaches for what is not its own.

Between a real reader and a real holder stands a relay that changes what one says to the other. What a peer does on the
wire of RDMA itself is the device's to refuse; here it is made to try by keys and addresses of another segment.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fleetstart.native._rdma import RdmaReader
from tests.rdma.guests import region as shared
from tests.rdma.guests.node import CALM_S, LIMIT_S, PORTS, Node

HELLO = struct.Struct("<8sIIIHBB16sII")
PART = struct.Struct("<QQQII")
MESSAGE = struct.Struct("<IIQQQ")
CONNECTED, ASK, READY = 2, 3, 4
SOUND = (b"FS-RDMA1", 1, 17, 4711, 0, 3, 1, bytes(10) + b"\xff\xff" + bytes([198, 18, 0, 1]), 1, 30_000)
"""A hello that is as it should be: magic, version, number, first packet, lid, mtu, link, gid, parts, silence."""

Rewrite = Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]]


def lie(node: Node, *words: bytes, closes: bool = False) -> str:
    """The reader's error when the holder says that and nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for word in words:
            theirs.sendall(word)
        if closes:
            theirs.shutdown(socket.SHUT_WR)
        try:
            reader = RdmaReader(ours.fileno(), node.memory, connect_s=0.3 if not words else 30, silence_s=CALM_S)
            return f"lost: {reason_of_loss(reader)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def reason_of_loss(reader: RdmaReader) -> str | None:
    """Waits until the connection is lost."""
    until_s = time.monotonic() + LIMIT_S
    while reader.error is None and time.monotonic() < until_s:
        time.sleep(0.01)
    return reader.error


def hello(**changes: Any) -> bytes:
    names = ("magic", "version", "number", "first_packet", "lid", "mtu", "link", "gid", "parts", "silence_ms")
    return HELLO.pack(*{**dict(zip(names, SOUND, strict=True)), **changes}.values())


def holders_that_lie(node: Node) -> dict[str, Any]:
    part = PART.pack(0, shared.REGION_BYTES, 4096, 1, 0)
    connected = MESSAGE.pack(CONNECTED, 0, 0, 0, 0)
    return {
        "stranger": lie(node, b"GET / HTTP/1.1\r\n\r\n" * 8, closes=True),
        "closed": lie(node, b"", closes=True),
        "half_open": lie(node),
        "version": lie(node, hello(version=2)),
        "mtu": lie(node, hello(mtu=9)),
        "many_parts": lie(node, hello(parts=1 << 21)),
        "overlap": lie(node, hello(parts=2), part, part),
        "overflow": lie(node, hello(), PART.pack(0, 1 << 63, (1 << 64) - 1, 1, 0)),
        "unasked": lie(node, hello(), part, connected, MESSAGE.pack(READY, 0, 77, 0, 4096)),
        "unknown": lie(node, hello(), part, connected, MESSAGE.pack(99, 0, 0, 0, 0)),
    }


@contextlib.contextmanager
def relay(port: int, rewrite: Rewrite, inject: bytes = b"") -> Iterator[socket.socket]:
    """The reader's end of a relay to a holder, whose parts are rewritten on the way; `inject` goes to the holder."""
    ours, theirs = socket.socketpair()
    with shared.connect(port) as holder, ours, theirs:

        def forward(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def forward_asks() -> None:
            holder.sendall(theirs.recv(HELLO.size, socket.MSG_WAITALL))
            holder.sendall(theirs.recv(MESSAGE.size, socket.MSG_WAITALL) + inject)
            forward(theirs, holder)

        def forward_parts() -> None:
            said = holder.recv(HELLO.size, socket.MSG_WAITALL)
            count = HELLO.unpack(said)[8]
            raw = holder.recv(count * PART.size, socket.MSG_WAITALL)
            parts = rewrite([PART.unpack_from(raw, index * PART.size) for index in range(count)])
            theirs.sendall(said + b"".join(PART.pack(*part) for part in parts))
            theirs.sendall(holder.recv(MESSAGE.size, socket.MSG_WAITALL))
            forward(holder, theirs)

        threads = [threading.Thread(target=one) for one in (forward_asks, forward_parts)]
        for thread in threads:
            thread.start()
        try:
            yield ours
        finally:
            for sock in (theirs, holder):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def read_one(node: Node, port: int, rewrite: Rewrite, inject: bytes = b"") -> list[str | None]:
    with relay(port, rewrite, inject) as sock:
        reader = RdmaReader(sock.fileno(), node.memory, connect_s=30, silence_s=CALM_S)
        if not inject:
            reader.submit(0, 0, shared.CHUNK_BYTES, LIMIT_S)
        statuses: list[str | None] = [one.status for one in reader.poll(LIMIT_S)]
        statuses.append(reason_of_loss(reader))
        return statuses


def other_segments_are_out_of_reach(node: Node) -> dict[str, Any]:
    """A reader of one segment uses the keys and addresses of the holder's other one."""
    ports = [next(PORTS), next(PORTS)]
    pid = node.holder("hold_two", ports=ports, connect_s=30, until_unix_ms=0)["pid"]
    others: list[tuple[int, ...]] = []

    def note(parts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        others.extend(parts)
        return parts

    with relay(ports[1], note) as sock:
        entitled = RdmaReader(sock.fileno(), node.memory, connect_s=30, silence_s=CALM_S)
        node.clear()
        found = read_one(node, ports[0], lambda parts: others)
        untouched = not any(node.region.view(0, shared.CHUNK_BYTES))
        entitled.submit(0, 0, shared.CHUNK_BYTES, LIMIT_S)
        own = [one.status for one in entitled.poll(LIMIT_S)]
        entitled.cancel()
        del entitled
    return {"other": found, "untouched": untouched, "own": own, **node.holder("outcome", pid=pid)}


def readers_that_lie(node: Node) -> dict[str, Any]:
    """One asks for bytes past the end; one says nothing at all."""
    ports = [next(PORTS), next(PORTS)]
    pid = node.holder("hold_two", ports=ports, connect_s=1.0, until_unix_ms=0)["pid"]
    past_end = MESSAGE.pack(ASK, 0, 1, shared.REGION_BYTES - 1, 2)
    with shared.connect(ports[1]):
        found = read_one(node, ports[0], lambda parts: parts, past_end)
        outcome = node.holder("outcome", pid=pid)
    return {"reader": found, **outcome}


def a_grant_ends_what_it_began(node: Node) -> dict[str, Any]:
    """Readers are cut off when their time is over."""
    ports = [next(PORTS), next(PORTS)]
    until_unix_ms = int((time.time() + 1.5) * 1000)
    pid = node.holder("hold_two", ports=ports, connect_s=30, until_unix_ms=until_unix_ms)["pid"]
    readers = [node.reader(port) for port in ports]
    errors = [reason_of_loss(reader) for reader in readers]
    del readers
    return {"errors": errors, **node.holder("outcome", pid=pid)}


def bad_arguments_are_refused(node: Node) -> dict[str, Any]:
    memory, region = node.memory, node.region
    errors = []
    for call in (
        lambda: memory.add(region, 0, shared.SLAB_BYTES),
        lambda: memory.add(region, shared.REGION_BYTES, shared.SLAB_BYTES),
    ):
        try:
            call()
            errors.append("")
        except Exception as error:
            errors.append(type(error).__name__)
    return {"errors": errors}


def slabs_stay_registered(_: Node) -> dict[str, Any]:
    """What is registered: with a first segment, when it is gone, with a second one, when that is gone, and when the
    pool has given its slabs back."""
    pool, rdma = shared.new_pool()
    found = []
    for _segment in range(2):
        region, memory = shared.new_region(pool, rdma)
        found.append(rdma.registered_bytes)
        del region, memory
        found.append(rdma.registered_bytes)
    pool.release(shared.SLABS)
    return {"has_windows": rdma.has_windows, "registered": [*found, rdma.registered_bytes]}


HOSTILE = (
    slabs_stay_registered,
    holders_that_lie,
    other_segments_are_out_of_reach,
    readers_that_lie,
    a_grant_ends_what_it_began,
    bad_arguments_are_refused,
)
