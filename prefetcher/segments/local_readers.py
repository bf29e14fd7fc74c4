"""Segments lent to processes that the daemon has not started, such as a plain `vllm serve` beside it.

A reader connects to a unix socket in the node's folder, which only the daemon's own user reaches; workers do not see
it. It names a checkpoint and gets its segment's descriptors. The segment is pinned as by a worker until the connection
ends. The digests of what it has read are checked before it is told that they are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from pathlib import Path

from fleetstart.runtime.contract.errors import FleetError, Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.channel import Channel, ChannelClosed, socket_address
from fleetstart.runtime.contract.node.messages import (
    ReaderMessage,
    ReadRefused,
    ReadSegment,
    SegmentLent,
    SegmentRead,
    SegmentVerified,
)

from .segment import Segment
from .store import SegmentStore, verified

log = logging.getLogger(__name__)

READERS_MAX = 64
"""More than the engines of one machine; each holds a connection and a pin."""
BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")


class LocalReaders:
    """The socket and its readers. On the event loop."""

    def __init__(self, path: Path, segments: SegmentStore) -> None:
        self._path = path
        self._segments = segments
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    def open(self) -> None:
        """Listens. A socket that cannot be opened leaves the node without readers: it serves its workers as before."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            with socket_address(self._path) as path:
                listener.bind(path)
            self._path.chmod(0o600)  # before it listens, nobody connects
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            log.warning("no other process reads segments of this node", extra={"error": str(error)})
            return
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._path.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # it is gone already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        channel: Channel[ReaderMessage] = Channel(connection, ReaderMessage, descriptors=0)
        reader = WorkerId(f"reader-{next(self._numbers)}")
        segment: Segment | None = None
        try:
            self._admit(connection)
            while True:
                match await _receive(channel):
                    case ReadSegment(checkpoint=checkpoint) if segment is None:
                        segment = await self._segments.acquire(checkpoint, reader)
                        log.info("segment lent", extra={"checkpoint": checkpoint, "reader": reader})
                        channel.send(SegmentLent(), segment.descriptors())
                    case SegmentRead() if segment is not None:
                        await verified(segment)
                        channel.send(SegmentVerified())
                    case _:
                        return
        except FleetError as error:
            with contextlib.suppress(ChannelClosed):
                channel.send(ReadRefused(error.info()))
        except ChannelClosed:
            pass
        finally:
            channel.close()
            if segment is not None:
                self._segments.release(segment, reader)

    def _admit(self, connection: socket.socket) -> None:
        """Errors: Unavailable for a process of another user, or one reader too many."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (0, os.geteuid()):
            raise Unavailable(f"user {user} reads no segments of this node, which user {os.geteuid()} runs")
        if len(self._tasks) > READERS_MAX:
            raise Unavailable(f"{READERS_MAX} processes read segments of this node", retry_after_s=1.0)


async def _receive(channel: Channel[ReaderMessage]) -> ReaderMessage:
    """The next message. Errors: ChannelClosed."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return channel.receive()[0]
        except BlockingIOError:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(channel, _wake, readable)
            try:
                await readable
            finally:
                loop.remove_reader(channel)


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
