"""Peers as sources of chunks: read from another node's memory straight into this one's, each hashed on the way.

A run's chunks are asked for at once and come one after the other. One that is still on its way to the peer comes when
the peer has it: the peer says every WAIT_S that it still waits, and how long that may go on, the fetch decides. Once
its first byte is there, a chunk must keep coming.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fleetstart import native
from fleetstart.runtime.contract.node.peers import Peer
from fleetstart.runtime.contract.weights.manifest import ChunkRange

from ..sources.base import Piece
from ..sources.errors import ReadCancelled, SourceError, SourceLost
from ..sources.throttle import BackgroundThrottle
from .connections import Connection, PeerConnections
from .framed import FramedCompletion, FramedReader
from .links import POLL_S
from .rdma import RdmaReads

log = logging.getLogger(__name__)

RUN_BYTES = 16 * 1024 * 1024
"""Bytes asked for at once: a round trip is short beside their time, and a peer that is lost loses few."""
STREAMS = 4
"""Connections of one fetch to one peer: with TLS, each has a core at either end."""
WAIT_S = 1.0
"""Wait for a chunk that the peer has yet to get, after which it says so. A peer that says nothing does not live: the
shorter this is, the sooner its chunks go elsewhere."""
ANSWER_S = 2.0
"""Time for an answer beside that wait."""
STALL_S = 2.0
"""Pause within a chunk after which it is given up."""
OUTSTANDING = 16
"""Chunks asked for at a time where they are small."""
CHUNK_S = 10.0
"""Time for the bytes of a chunk, however evenly they drip."""
WHY_NOT = {"gone": "its own fetch of the checkpoint failed", "refused": "it has no such chunk"}
"""Answers after which nothing more comes, in words."""


class RangeReader(Protocol):
    """One connection to a peer, whatever carries its bytes: `native.TcpReader`, `FramedReader`, `rdma.RdmaLink`."""

    def submit_into(self, request: int, offset: int, into: memoryview, wait_s: float = 0.0) -> None: ...
    def poll(self, timeout_s: float) -> Sequence[native.Completion | FramedCompletion]: ...
    def cancel(self) -> None: ...
    def release(self) -> None: ...
    @property
    def error(self) -> str | None: ...


class _Run:
    """Consecutive chunks that are read, and the checksums of those that came, by whatever connection."""

    def __init__(self, run: Sequence[ChunkRange], pieces: Sequence[Piece]) -> None:
        self._rooms = {chunk.index: (chunk, piece) for chunk, piece in zip(run, pieces, strict=True)}
        self._came: dict[int, int] = {}
        self._next = 0
        self._order = [chunk.index for chunk in run]

    @property
    def missing(self) -> list[int]:
        return [index for index in self._order if index not in self._came]

    @property
    def came_bytes(self) -> int:
        return sum(self._rooms[index][0].size_bytes for index in self._came)

    def submit(self, reader: RangeReader, index: int) -> None:
        chunk, piece = self._rooms[index]
        reader.submit_into(index, chunk.segment_offset, piece.into, WAIT_S)

    def note(self, index: int, checksum: int) -> None:
        self._came[index] = checksum

    def ready(self) -> Iterator[int]:
        """The checksums that are next in the order of the run, each once."""
        while self._next < len(self._order) and self._order[self._next] in self._came:
            self._next += 1
            yield self._came[self._order[self._next - 1]]


class PeerChunks:
    """One peer as a source of one checkpoint's chunks."""

    run_bytes = RUN_BYTES

    def __init__(self, peer: Peer, connections: PeerConnections, rdma: RdmaReads | None = None) -> None:
        """`rdma`: reads by RDMA, where this node can."""
        self.name = f"peer:{peer.node}"
        self._peer = peer
        self._connections = connections
        self._rdma = rdma

    def renew(self, peer: Peer) -> None:
        """Uses a later grant of the same peer from now on."""
        self._peer = peer

    def read(
        self,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None = None,
    ) -> Iterator[int]:
        """Errors: SourceError, SourceLost, ReadCancelled."""
        if stopped():
            raise ReadCancelled(self.name)
        chunks, peer, rdma = _Run(run, pieces), self._peer, self._rdma
        if rdma is not None and throttle is None and self._offers_rdma:
            try:
                yield from self._read_by_rdma(rdma, peer, chunks, stopped)
                return
            except (OSError, EOFError, native.NativeError, SourceError) as error:
                if self._gives_up_rdma(peer):
                    log.warning("reads by RDMA go on by TCP", extra={"source": self.name, "error": str(error)})
        yield from self._read_by_tcp(chunks, stopped, throttle)

    @property
    def _offers_rdma(self) -> bool:
        return "rdma" in self._peer.transports and not self._peer.host

    def _gives_up_rdma(self, peer: Peer) -> bool:
        """After a failure the fetch reads by TCP, unless the failed connection ended with a grant that was renewed
        since. True for the first failure."""
        if peer.grant != self._peer.grant:
            return False
        was, self._rdma = self._rdma, None
        return was is not None

    def _read_by_rdma(self, rdma: RdmaReads, peer: Peer, chunks: _Run, stopped: Callable[[], bool]) -> Iterator[int]:
        link, is_whole = None, False
        try:
            link = rdma.take(peer)
            yield from self._collect(link, chunks, stopped)
            is_whole = True
        finally:
            if link is not None:
                rdma.node.note_received(chunks.came_bytes)
                if is_whole:
                    rdma.give_back(link)
                else:
                    link.cancel()

    def _read_by_tcp(
        self, chunks: _Run, stopped: Callable[[], bool], throttle: BackgroundThrottle | None
    ) -> Iterator[int]:
        peer, before_bytes = self._peer, chunks.came_bytes
        for fresh in (False, True):
            window_bytes = throttle.window_bytes if throttle is not None else None
            connection = self._connections.take(peer, fresh=fresh, window_bytes=window_bytes)
            is_whole = False
            try:
                reader = self._tcp_reader(connection, stopped, throttle)
                yield from self._collect(reader, chunks, stopped, throttle)
                is_whole = True
                return
            except (OSError, EOFError) as error:
                if connection.is_warm and chunks.came_bytes == before_bytes:
                    continue  # the holder had closed it
                raise SourceError(f"{self.name}: {str(error) or type(error).__name__}") from error
            finally:
                if is_whole and throttle is None:
                    self._connections.give_back(peer, connection)
                else:
                    connection.link.close()

    def _tcp_reader(
        self, connection: Connection, stopped: Callable[[], bool], throttle: BackgroundThrottle | None
    ) -> RangeReader:
        fd = connection.link.native_fd() if throttle is None else None
        if fd is not None:
            return native.TcpReader(fd, None, STALL_S)
        return FramedReader(connection.link, STALL_S, throttle, stopped)

    def _collect(
        self,
        reader: RangeReader,
        chunks: _Run,
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None = None,
    ) -> Iterator[int]:
        """The checksums in the order of the run; chunks come in any order. What the peer had to wait for is asked for
        again, behind the rest. At a measured pace, one is asked for at a time: the peer sends at once what is."""
        left, outstanding, moved_s = deque(chunks.missing), 0, time.monotonic()
        most = OUTSTANDING if throttle is None else 1
        while True:
            yield from chunks.ready()
            while left and outstanding < most:
                chunks.submit(reader, left.popleft())
                outstanding += 1
            if not outstanding:
                break
            if stopped():
                reader.cancel()
                raise ReadCancelled(self.name)
            completions = reader.poll(POLL_S)
            outstanding -= len(completions)
            for one in completions:
                if one.status == "ok":
                    chunks.note(one.request, one.checksum)
                else:
                    self._check_status(one, reader)
                    left.append(one.request)
            moved_s = time.monotonic() if completions else moved_s
            if throttle is None and time.monotonic() - moved_s > WAIT_S + ANSWER_S + CHUNK_S:
                raise SourceError(f"{self.name}: a chunk takes more than {CHUNK_S:g} s")
        reader.release()

    def _check_status(self, completion: native.Completion | FramedCompletion, reader: RangeReader) -> None:
        """Returns if the peer has waited for the chunk itself. Errors: SourceLost; OSError of the connection."""
        if completion.status == "failed":
            raise ConnectionError(reader.error)
        if completion.status != "not_ready":
            raise SourceLost(f"{self.name}: {WHY_NOT[completion.status]}")
