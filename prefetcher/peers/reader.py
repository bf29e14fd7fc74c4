"""Peers as sources of chunks: read from another node's memory straight into this one's, each hashed on the way.

A run's chunks are asked for at once and come one after the other. One that is still on its way to the peer comes when
the peer has it: the peer says every WAIT_S that it still waits, and how long that may go on, the fetch decides. Once
its first byte is there, a chunk must keep coming.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from fleetstart import native
from fleetstart.runtime.contract.node.peers import Peer
from fleetstart.runtime.contract.weights.manifest import ChunkRange

from ..sources.base import Piece
from ..sources.errors import ReadCancelled, SourceError, SourceLost
from ..sources.throttle import BackgroundThrottle
from . import frames
from .connections import Connection, PeerConnections
from .links import POLL_S

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


class PeerChunks:
    """One peer as a source of one checkpoint's chunks."""

    run_bytes = RUN_BYTES

    def __init__(self, peer: Peer, connections: PeerConnections) -> None:
        self.name = f"peer:{peer.node}"
        self._peer = peer
        self._connections = connections

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
        peer, done = self._peer, 0
        for fresh in (False, True):
            window_bytes = throttle.window_bytes if throttle is not None else None
            connection = self._connections.take(peer, fresh=fresh, window_bytes=window_bytes)
            is_whole = False
            try:
                fd = connection.link.native_fd() if throttle is None else None
                if fd is not None:
                    checksums = self._stream(connection, fd, run[done:], pieces[done:], stopped)
                else:
                    checksums = self._chunks(connection, run[done:], pieces[done:], stopped, throttle)
                for checksum in checksums:
                    done += 1
                    yield checksum
                is_whole = True
                return
            except (OSError, EOFError) as error:
                if connection.is_warm and not done:
                    continue  # the holder had closed it
                raise SourceError(f"{self.name}: {str(error) or type(error).__name__}") from error
            finally:
                if is_whole and throttle is None:
                    self._connections.give_back(peer, connection)
                else:
                    connection.link.close()

    def _stream(
        self,
        connection: Connection,
        fd: int,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
    ) -> Iterator[int]:
        """The checksums in the order of the run, by the native transport; they come in any order."""
        connection.stream(time.monotonic() + ANSWER_S)
        reader = native.TcpReader(fd, None, STALL_S)
        rooms = {chunk.index: (chunk, piece) for chunk, piece in zip(run, pieces, strict=True)}
        left, came, outstanding = deque(rooms), dict[int, int](), 0
        moved_s = time.monotonic()
        for chunk in run:
            while chunk.index not in came:
                while left and outstanding < OUTSTANDING:
                    index = left.popleft()
                    room = rooms[index]
                    reader.submit_into(index, room[0].segment_offset, room[1].into, WAIT_S)
                    outstanding += 1
                if stopped():
                    reader.cancel()
                    raise ReadCancelled(self.name)
                completions = reader.poll(POLL_S)
                outstanding -= len(completions)
                for one in completions:
                    if one.status == "ok":
                        came[one.request] = one.checksum
                    else:
                        self._check_status(one, reader)
                        left.append(one.request)
                moved_s = time.monotonic() if completions else moved_s
                if time.monotonic() - moved_s > WAIT_S + ANSWER_S + CHUNK_S:
                    raise SourceError(f"{self.name}: chunk {chunk.index} takes more than {CHUNK_S:g} s")
            yield came[chunk.index]
        reader.release()

    def _check_status(self, completion: native.Completion, reader: native.TcpReader) -> None:
        """Returns if the peer has waited for the chunk itself. Errors: SourceLost; OSError of the connection."""
        if completion.status == "failed":
            raise ConnectionError(reader.error)
        if completion.status != "not_ready":
            status = frames.FAILED if completion.status == "gone" else frames.INVALID
            raise SourceLost(f"{self.name}: {frames.STATUS[status]}")

    def _chunks(
        self,
        connection: Connection,
        run: Sequence[ChunkRange],
        pieces: Sequence[Piece],
        stopped: Callable[[], bool],
        throttle: BackgroundThrottle | None,
    ) -> Iterator[int]:
        """The checksums in the order of the run. What the peer had to wait for is asked for again, behind the rest."""
        rooms = {chunk.index: (chunk, piece) for chunk, piece in zip(run, pieces, strict=True)}
        came: dict[int, int] = {}
        asked: deque[int] = deque()
        for chunk in run:
            while chunk.index not in came:
                if throttle is None and not asked:
                    later = [one.index for one in run if one.index >= chunk.index and one.index not in came]
                    self._ask(connection, later, asked)
                elif throttle is not None:
                    self._ask(connection, [chunk.index], asked)
                index = asked.popleft()
                if self._is_coming(connection, rooms[index][0], stopped):
                    came[index] = self._receive(connection, rooms[index][1], stopped, throttle)
            yield came[chunk.index]

    def _ask(self, connection: Connection, chunks: Sequence[int], asked: deque[int]) -> None:
        requests = [frames.REQUEST.pack(frames.READ, chunk, int(WAIT_S * 1000), 0) for chunk in chunks]
        connection.link.send(b"".join(requests), time.monotonic() + ANSWER_S)
        asked.extend(chunks)

    def _is_coming(self, connection: Connection, chunk: ChunkRange, stopped: Callable[[], bool]) -> bool:
        """Returns when the chunk's bytes begin to come, or False when the peer has waited for them itself."""
        link, until_s = connection.link, time.monotonic() + WAIT_S + ANSWER_S
        while not link.waits(POLL_S):
            if stopped():
                raise ReadCancelled(self.name)
            if time.monotonic() >= until_s:
                raise SourceError(f"{self.name}: no answer in {WAIT_S + ANSWER_S:g} s")
        status, index, size_bytes = frames.RESPONSE.unpack(
            link.receive(frames.RESPONSE.size, time.monotonic() + STALL_S)
        )
        if status == frames.NOT_READY and index == chunk.index:
            return False
        if status != frames.OK:
            raise SourceLost(f"{self.name}: {frames.STATUS.get(status, f'status {status}')}")
        if (index, size_bytes) != (chunk.index, chunk.size_bytes):
            raise SourceLost(
                f"{self.name}: {size_bytes:,} bytes of chunk {index} for {chunk.size_bytes:,} of chunk {chunk.index}"
            )
        return True

    def _receive(
        self, connection: Connection, piece: Piece, stopped: Callable[[], bool], throttle: BackgroundThrottle | None
    ) -> int:
        """Fills the piece; returns its xxh3."""
        into = piece.into
        checksum = native.Checksum(into)
        filled, began_s = 0, time.monotonic()
        moved_s = began_s
        most_bytes = throttle.portion_bytes if throttle is not None else None
        while filled < len(into):
            if stopped():
                raise ReadCancelled(self.name)
            before, filled = filled, connection.link.fill(into, checksum, filled, most_bytes)
            if throttle is not None:
                throttle.wait(filled - before, stopped)
            now_s = time.monotonic()
            moved_s = now_s if filled > before else moved_s
            is_late = throttle is None and now_s - began_s > CHUNK_S
            if is_late or now_s - moved_s > STALL_S:
                raise SourceError(f"{self.name}: {filled:,} of {len(into):,} bytes in {now_s - began_s:.1f} s")
        return checksum.digest()
