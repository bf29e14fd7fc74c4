"""Ends of a pull, each a process: one has the bytes, the other gets them over loopback. Ours, and plain sockets.

Both have their memory from the node's own pool, touched before the clock starts, so that they differ in what they do
with the socket alone. The plain ones use what Python has: `os.sendfile` out of the slabs, `recv_into` the slabs, a MiB
at a time; one of them hashes each chunk when it has it, which makes it do what ours does.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from fleetstart import native
from fleetstart.prefetcher.segments.slab_memory import open_pool
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES

OURS, OURS_ACROSS = "fleetstart", "fleetstart, as between machines"
"""Kinds of our own pull. In the second one the reader has another address than the server, which then sends pages
without a copy."""
BLOCK_BYTES = 1 << 20
OUTSTANDING = 4
"""Chunks asked for at a time: the next is on its way when one is here."""
LATER_MS = 10**15
PATIENCE_S = 60.0


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Memory:
    """A region of so many chunks, written once."""

    def __init__(self, size_bytes: int, content: Callable[[int], bytes]) -> None:
        self.size_bytes = size_bytes
        self.pool, _ = open_pool("peer-pull", size_bytes)
        self.region = self.pool.take(size_bytes)
        self.slab_bytes = self.pool.slab_bytes
        for at in range(0, size_bytes, CHUNK_BYTES):
            self.region.view(at, CHUNK_BYTES)[:] = content(at // CHUNK_BYTES)

    def checksums(self) -> list[int]:
        return [native.xxh3(self.region.view(at, CHUNK_BYTES)) for at in range(0, self.size_bytes, CHUNK_BYTES)]


def content_of(chunk: int) -> bytes:
    return chunk.to_bytes(8, "little") * (CHUNK_BYTES // 8)


# ── the end that has the bytes ─────────────────────────────────────────────────────────────────────


def serve(connection: socket.socket, memory: Memory, kind: str) -> None:
    chunks = memory.size_bytes // CHUNK_BYTES
    if kind in (OURS, OURS_ACROSS):
        control = native.ControlBlock.create("peer-pull", chunks, b"", 1)
        for chunk in range(chunks):
            control.mark_ready(chunk)
        server = native.TcpServer(connection.fileno(), memory.region, control, CHUNK_BYTES, [(0, chunks)])
        server.run(LATER_MS)
        return
    for slab in memory.region.fds:
        sent = 0
        while sent < memory.slab_bytes:
            sent += os.sendfile(connection.fileno(), slab, sent, min(BLOCK_BYTES, memory.slab_bytes - sent))
    connection.recv(1)


def serving(memory: Memory, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        say(port=listening.getsockname()[1], checksums=memory.checksums(), pages=memory.pool.pages)
        for _ in sys.stdin:
            connection, _ = listening.accept()
            began = cpu_s()
            with connection:
                serve(connection, memory, kind)
            say(cpu_s=cpu_s() - began)


# ── the end that gets them ─────────────────────────────────────────────────────────────────────────


def pull(connection: socket.socket, memory: Memory, kind: str) -> list[int]:
    """The checksums of its chunks, if this kind verifies."""
    if kind in (OURS, OURS_ACROSS):
        return _pull_ours(connection, memory)
    found: list[int] = []
    for at in range(0, memory.size_bytes, CHUNK_BYTES):
        view, done = memory.region.view(at, CHUNK_BYTES), 0
        while done < CHUNK_BYTES:
            done += connection.recv_into(view[done:], min(BLOCK_BYTES, CHUNK_BYTES - done))
        if kind == "sockets, hashed":
            found.append(native.xxh3(view))
    return found


def _pull_ours(connection: socket.socket, memory: Memory) -> list[int]:
    reader = native.TcpReader(connection.fileno(), memory.region)
    chunks = memory.size_bytes // CHUNK_BYTES
    found, asked, done = [0] * chunks, 0, 0
    while done < chunks:
        while asked < min(chunks, done + OUTSTANDING):
            reader.submit(asked, asked * CHUNK_BYTES, CHUNK_BYTES)
            asked += 1
        for completion in reader.poll(PATIENCE_S):
            if completion.status != "ok":
                raise RuntimeError(f"chunk {completion.request}: {completion.status}, {reader.error}")
            found[completion.request] = completion.checksum
            done += 1
    return found


def pulling(memory: Memory, kind: str) -> None:
    say()
    for line in sys.stdin:
        question = json.loads(line)
        own = ("127.0.0.2" if kind == OURS_ACROSS else "127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", question["port"]), source_address=own) as connection:
            cpu, began = cpu_s(), time.perf_counter()
            found = pull(connection, memory, kind)
            ready_s = time.perf_counter() - began
            used_s = cpu_s() - cpu
        say(ready_s=ready_s, cpu_s=used_s, verified=found, checksums=memory.checksums() if question["check"] else [])


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def run_end(serving: Callable[[Memory, str], None], pulling: Callable[[Memory, str], None]) -> None:
    """Runs the end that the process's arguments name: role, kind, size in bytes."""
    role, kind, size_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "serve":
        serving(Memory(size_bytes, content_of), kind)
    else:
        pulling(Memory(size_bytes, lambda _: b"\xff" * CHUNK_BYTES), kind)


if __name__ == "__main__":
    run_end(serving, pulling)
