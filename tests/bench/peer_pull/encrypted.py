"""Ends of a pull inside TLS, each a process: ours as daemons have it, and plain TLS sockets.

Both ends have certificates, made when the one that has the bytes starts. Ours is the holder's session and the reader's
source of chunks; the plain one sends as much at a time and hashes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import sys
import time
from typing import Any

import msgspec

from fleetstart import native
from fleetstart.prefetcher.peers.connections import PeerConnections
from fleetstart.prefetcher.peers.holdings import Held, Holdings
from fleetstart.prefetcher.peers.links import SLICE_BYTES, TlsLink
from fleetstart.prefetcher.peers.reader import RUN_BYTES, PeerChunks
from fleetstart.prefetcher.peers.session import Closed, Session
from fleetstart.prefetcher.segments.segment import Segment
from fleetstart.prefetcher.sources.base import Piece
from fleetstart.runtime.contract.identity import Identity, client_context, node_host, server_context
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.peers import Grant, Peer
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES, ChunkRange
from tests.bench.peer_pull.ends import Memory, cpu_s, run_end, say
from tests.tls.identities import JOIN, authority, node_identity

CHECKPOINT = CheckpointId("0" * 64)
HOLDER, READER = NodeId("holder"), NodeId("reader")
LATER_UNIX_MS = 4_000_000_000_000


class OneSegment(Holdings):
    """Holdings of a node whose one segment is pinned for ever."""

    def __init__(self, held: Held) -> None:
        self._only = held

    def pin(self, checkpoint: CheckpointId, reader: WorkerId, wait_s: float) -> Held:
        return self._only

    def unpin(self, held: Held, reader: WorkerId) -> None:
        pass


def chunks_of(memory: Memory) -> list[ChunkRange]:
    return [
        ChunkRange(at // CHUNK_BYTES, "part", at, at, CHUNK_BYTES, 0) for at in range(0, memory.size_bytes, CHUNK_BYTES)
    ]


def held(memory: Memory) -> Held:
    chunks = memory.size_bytes // CHUNK_BYTES
    control = native.ControlBlock.create("peer-pull", chunks, b"", 1)
    for chunk in range(chunks):
        control.mark_ready(chunk)
    segment = Segment(CHECKPOINT, asyncio.new_event_loop().create_future())
    return Held(segment, memory.region, control, memory.slab_bytes, CHUNK_BYTES, ())


def serve(connection: ssl.SSLSocket, memory: Memory, kind: str, segment: Held) -> None:
    if kind == "fleetstart, TLS":
        Session(
            TlsLink(connection),
            name="bench",
            certified=None,
            holdings=OneSegment(segment),
            refusal=lambda *_: None,
            admit=lambda _: True,
            sent=lambda *_: None,
            stopped=lambda: False,
        ).run()
        return
    for at in range(0, memory.size_bytes, CHUNK_BYTES):
        view = memory.region.view(at, CHUNK_BYTES)
        for begin in range(0, CHUNK_BYTES, SLICE_BYTES):
            connection.sendall(view[begin : begin + SLICE_BYTES])
    connection.recv(1)


def serving(memory: Memory, kind: str) -> None:
    system = authority()
    context = server_context(node_identity(system, HOLDER))
    segment, reader = held(memory), node_identity(system, READER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        say(
            port=listening.getsockname()[1],
            checksums=memory.checksums(),
            pages=memory.pool.pages,
            identity=msgspec.structs.asdict(reader),
        )
        for _ in sys.stdin:
            accepted, _ = listening.accept()
            began = cpu_s()
            with context.wrap_socket(accepted, server_side=True) as connection, contextlib.suppress(Closed):
                serve(connection, memory, kind, segment)
            say(cpu_s=cpu_s() - began)


def pull_ours(port: int, memory: Memory, context: ssl.SSLContext) -> list[int]:
    grant = Grant(checkpoint=CHECKPOINT, holder=HOLDER, epoch="e", reader=READER, expires_unix_ms=LATER_UNIX_MS)
    peer = Peer(node=HOLDER, address=f"127.0.0.1:{port}", host=node_host(HOLDER, JOIN), grant=grant, secret="00" * 32)
    connections = PeerConnections(lambda: context)
    source = PeerChunks(peer, connections)
    found: list[int] = []
    chunks, together = chunks_of(memory), RUN_BYTES // CHUNK_BYTES
    for first in range(0, len(chunks), together):
        run = chunks[first : first + together]
        pieces = [Piece(CHUNK_BYTES, memory.region.view(chunk.segment_offset, CHUNK_BYTES)) for chunk in run]
        found += source.read(run, pieces, lambda: False)
    connections.close()
    return found


def pull_plain(port: int, memory: Memory, context: ssl.SSLContext) -> list[int]:
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname=node_host(HOLDER, JOIN)) as connection,
    ):
        for at in range(0, memory.size_bytes, CHUNK_BYTES):
            view, done = memory.region.view(at, CHUNK_BYTES), 0
            while done < CHUNK_BYTES:
                done += connection.recv_into(view[done : done + SLICE_BYTES])
    return []


def pulling(memory: Memory, kind: str) -> None:
    say()
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        context = client_context(Identity(**question["identity"]))
        cpu, began = cpu_s(), time.perf_counter()
        found = (pull_ours if kind == "fleetstart, TLS" else pull_plain)(question["port"], memory, context)
        ready_s, used_s = time.perf_counter() - began, cpu_s() - cpu
        say(ready_s=ready_s, cpu_s=used_s, verified=found, checksums=memory.checksums() if question["check"] else [])


if __name__ == "__main__":
    run_end(serving, pulling)
