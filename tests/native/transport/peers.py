"""Two ends of a peer's connection in one process: a segment that is served, a region that is filled, and sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from fleetstart.native import Completion, ControlBlock, Region, SlabPool, TcpReader, TcpServer
from tests.native.neighbours import PATIENCE_S

CHUNK = 64 * 1024
CHUNKS = 32
SLAB = 4 * CHUNK
SIZE = CHUNK * CHUNKS
CONTENT = b"".join(bytes([chunk]) + chunk.to_bytes(2, "big") * (CHUNK // 2 - 1) + b"!" for chunk in range(CHUNKS))
LATER_MS = 10**15


def region(slab_bytes: int = SLAB, content: bytes = b"") -> Region:
    """A new region of SIZE bytes, with that content at its beginning."""
    pool = SlabPool("peer", pages="small", slab_bytes=slab_bytes, capacity=SIZE // slab_bytes)
    made = pool.take(SIZE)
    for at in range(0, len(content), slab_bytes):
        piece = content[at : at + slab_bytes]
        made.view(at, len(piece))[:] = piece
    return made


def content_of(filled: Region, offset: int, size_bytes: int) -> bytes:
    return bytes(filled.view(offset, size_bytes))


def whole(filled: Region, slab_bytes: int = SLAB) -> bytes:
    return b"".join(content_of(filled, at, slab_bytes) for at in range(0, SIZE, slab_bytes))


def checksum(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    return ours, theirs


@dataclass(slots=True)
class Serving:
    """A server of a segment whose chunks the test marks ready, in a thread, and the reader's end of its connection."""

    socket: socket.socket
    """The reader's."""
    control: ControlBlock
    server: TcpServer
    outcome: list[str | Exception] = field(default_factory=list)
    thread: threading.Thread | None = None

    def run(self, until_unix_ms: int, idle_s: float) -> None:
        try:
            self.outcome.append(self.server.run(until_unix_ms, idle_s))
        except Exception as error:  # the test looks at it
            self.outcome.append(error)

    def ended(self) -> str | Exception:
        """What its run returned or raised."""
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        return self.outcome[0]


@contextlib.contextmanager
def serving(
    *,
    ready: Sequence[int] = range(CHUNKS),
    allowed: Sequence[tuple[int, int]] = ((0, CHUNKS),),
    slab_bytes: int = SLAB,
    until_unix_ms: int = LATER_MS,
    stall_s: float = PATIENCE_S,
    idle_s: float = 1e6,
    pair: tuple[socket.socket, socket.socket] | None = None,
    segment: Region | None = None,
) -> Iterator[Serving]:
    control = ControlBlock.create("peer", CHUNKS, b"", 1)
    for chunk in ready:
        control.mark_ready(chunk)
    ours, theirs = pair or tcp_pair()
    with theirs:
        held = segment or region(slab_bytes, CONTENT)
        server = TcpServer(theirs.fileno(), held, control, CHUNK, allowed, stall_s)
    with ours:
        made = Serving(ours, control, server)
        made.thread = threading.Thread(target=made.run, args=(until_unix_ms, idle_s), daemon=True)
        made.thread.start()
        try:
            yield made
        finally:
            server.stop()
            made.thread.join(PATIENCE_S)
            assert not made.thread.is_alive()


def completions(reader: TcpReader, count: int) -> list[Completion]:
    """The next so many."""
    found: list[Completion] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += reader.poll(PATIENCE_S)
    assert len(found) == count
    return found


def outcomes(reader: TcpReader, count: int) -> dict[int, str]:
    """Request → status of the next so many."""
    return {one.request: one.status for one in completions(reader, count)}
