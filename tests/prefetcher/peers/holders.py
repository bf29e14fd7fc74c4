"""A node that holds a checkpoint and serves it to peers, and what its readers need: grants, pieces, certificates."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetstart.prefetcher.peers.connections import PeerConnections
from fleetstart.prefetcher.peers.grants import PeerKeys
from fleetstart.prefetcher.peers.holdings import Holdings
from fleetstart.prefetcher.peers.reader import PeerChunks
from fleetstart.prefetcher.peers.server import PeerServer
from fleetstart.prefetcher.segments.store import Segment, SegmentStore
from fleetstart.prefetcher.sources.base import Piece, Source
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.ids import CheckpointId, NodeId, WorkerId
from fleetstart.runtime.contract.node.peers import PEER_KEY_BYTES, Grant, Peer, grant_secret
from fleetstart.runtime.contract.weights.manifest import ChunkRange, chunk_ranges
from tests.prefetcher.stages import Model

HOLDER, READER = NodeId("holder"), NodeId("reader")
EPOCH = "e-1"
OWNER = WorkerId("w-owner")
Result = TypeVar("Result")


def no_certificate() -> ssl.SSLContext:
    """What a node without a certificate has in its place."""
    raise ValueError("no certificate")


class Holder:
    """A node's segments and its peer server, on an event loop of their own."""

    def __init__(
        self,
        source: Source,
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        host: str = "",
        memory: int = 1 << 30,
    ) -> None:
        self.key = os.urandom(PEER_KEY_BYTES)
        self.key_reads = 0
        self.host = host
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.segments = self.run(self._segments(source))
        self.server, (address, port) = self.run(self._open(context))
        self.address = f"{address}:{port}"

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _segments(self, source: Source) -> SegmentStore:
        return SegmentStore(source=source, memory_bytes=1 << 30, workers_bytes=lambda: 0, threads=4)

    async def _open(self, context: Callable[[], ssl.SSLContext] | None) -> tuple[PeerServer, tuple[str, int]]:
        async def read() -> bytes:
            self.key_reads += 1
            return self.key

        server = PeerServer(
            node=HOLDER, epoch=EPOCH, holdings=Holdings(self.segments), keys=PeerKeys(read), context=context
        )
        return server, server.open("127.0.0.1")

    def hold(self, checkpoint: CheckpointId, *, whole: bool = True) -> Segment:
        """Fetches the checkpoint from its own source, without a pin once it is there."""

        async def fetch() -> Segment:
            segment = await self.segments.acquire(checkpoint, OWNER)
            if whole:
                await segment.filled.wait()
                assert segment.error is None
                self.segments.release(segment, OWNER)
            return segment

        return self.run(fetch())

    def peer(self, checkpoint: CheckpointId, *, key: bytes | None = None, life_s: float = 60.0, **fields: Any) -> Peer:
        grant = Grant(
            checkpoint=checkpoint,
            holder=HOLDER,
            epoch=EPOCH,
            reader=READER,
            expires_unix_ms=int((time.time() + life_s) * 1000),
        )
        grant = msgspec.structs.replace(grant, **fields)
        secret = grant_secret(grant, key or self.key)
        everything = ((0, 1 << 20),)
        return Peer(
            node=grant.holder, address=self.address, host=self.host, grant=grant, secret=secret, ranges=everything
        )

    def pins(self, checkpoint: CheckpointId) -> set[WorkerId]:
        segment = self.segments.budget.segments.get(checkpoint)
        return set(segment.pins) if segment is not None else set()

    def close(self) -> None:
        self.server.close()
        self.run(self.segments.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def holder_of(model: Model, folder: Path, **options: Any) -> Holder:
    """A node that has the whole model in memory."""
    holder = Holder(FolderSource(folder), **options)
    holder.hold(model.checkpoint)
    return holder


class Reading:
    """Memory for chunks of a model, and what a peer put there."""

    def __init__(self, model: Model, count: int | None = None) -> None:
        self.chunks: Sequence[ChunkRange] = chunk_ranges(model.manifest)[:count]
        self.memory = bytearray(len(model.data))
        self._view = memoryview(self.memory)
        self._data = model.data

    def read(
        self, peer: Peer, connections: PeerConnections | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Reads the chunks as one run; returns their checksums."""
        own = connections or PeerConnections(no_certificate)
        try:
            return self.read_by(PeerChunks(peer, own), stopped)
        finally:
            if connections is None:
                own.close()

    def read_by(self, source: PeerChunks, stopped: Callable[[], bool] = lambda: False) -> list[int]:
        pieces = [
            Piece(chunk.size_bytes, self._view[chunk.segment_offset : chunk.segment_offset + chunk.size_bytes])
            for chunk in self.chunks
        ]
        return list(source.read(self.chunks, pieces, stopped))

    @property
    def is_right(self) -> bool:
        end = self.chunks[-1].segment_offset + self.chunks[-1].size_bytes
        return self.memory[:end] == self._data[:end]
