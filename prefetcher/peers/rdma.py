"""RDMA between nodes: the node's device, segments registered with it, and reads from a peer's memory by it.

The bytes of RDMA are not encrypted: it is for networks that their operators declared private. What a reader may read is
the memory of one segment, as long as its connection lives: the holder ends it with the grant.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from fleetstart import native
from fleetstart.runtime.contract.node.peers import Peer

from ..network.rdma_devices import SYSFS, is_port_active, rdma_devices
from ..segments.feeds import FetchMemory
from .connections import PeerConnections
from .holdings import Held

if TYPE_CHECKING:
    from fleetstart.native._rdma import RdmaMemory, RdmaReader, RdmaServer

log = logging.getLogger(__name__)

CONNECT_S = 2.0
SILENCE_S = 0.8
"""Time without a word from the other end after which it counts as gone: it says something five times in it."""
STALL_S = 2.0
"""Pause of what flows after which a connection is given up."""
IDLE_S = 1.0
"""Time that an unused connection is kept: its holder keeps the segment in memory for it."""
POLL_S = 0.1


class NodeRdma:
    """The node's RDMA device, and the segments that are registered with it. Thread-safe."""

    def __init__(self, device: str) -> None:
        """Errors: OSError."""
        from fleetstart.native._rdma import RdmaDevice  # present: a device was found by it

        self._device = RdmaDevice(device)
        self._lock = threading.Lock()
        self._registered: weakref.WeakKeyDictionary[native.Region, tuple[frozenset[int], RdmaMemory]] = (
            weakref.WeakKeyDictionary()
        )
        self.received_bytes = 0
        """Bytes of chunks that other nodes' memory gave by RDMA."""

    @property
    def is_up(self) -> bool:
        return is_port_active(SYSFS / self._device.name)

    @property
    def has_windows(self) -> bool:
        """True if connections open windows in memory that is registered without remote access: the node's pool is then
        registered once, slab by slab as segments get them, and not anew for each segment."""
        return self._device.has_windows

    @property
    def registered_bytes(self) -> int:
        """Memory that is registered with the device now."""
        return self._device.registered_bytes

    def memory(self, region: native.Region, slab_bytes: int, slabs: Collection[int]) -> RdmaMemory:
        """A segment's memory, registered with the device: its pages come now. Where the device has memory windows, a
        slab stays registered as long as the pool has it, for the next segment that gets it; else as long as the
        segment. Errors: OSError."""
        from fleetstart.native._rdma import RdmaMemory

        with self._lock:
            known = self._registered.get(region)
            if known is not None and known[0] >= set(slabs):
                return known[1]
            memory = RdmaMemory(self._device)
            for slab in sorted(slabs):
                offset = slab * slab_bytes
                memory.add(region, offset, min(slab_bytes, region.size_bytes - offset))
            self._registered[region] = frozenset(slabs), memory
            return memory

    def note_received(self, size_bytes: int) -> None:
        with self._lock:
            self.received_bytes += size_bytes

    def server(self, fd: int, held: Held) -> RdmaServer:
        """Serves a segment to the reader at the other end of a socket. Errors: OSError."""
        from fleetstart.native._rdma import RdmaServer

        memory = self.memory(held.region, held.slab_bytes, held.granted)
        everything = [(0, held.control.chunk_count)]
        return RdmaServer(
            fd, memory, held.control, held.chunk_bytes, everything, connect_s=CONNECT_S, silence_s=SILENCE_S
        )


def open_rdma() -> NodeRdma | None:
    """The first device of this node that can be used; None where there is none."""
    for device in rdma_devices():
        if device.usable:
            try:
                return NodeRdma(device.name)
            except OSError as error:
                log.warning("an RDMA device cannot be used", extra={"device": device.name, "error": str(error)})
    return None


class RdmaLink:
    """One connection to a peer by RDMA, under the grant that it was made with."""

    def __init__(self, reader: RdmaReader, peer: Peer) -> None:
        self._reader = reader
        self.grant = peer.grant
        self.idle_since_s = 0.0

    def submit_into(self, request: int, offset: int, into: memoryview, wait_s: float = 0.0) -> None:
        """Reads into the segment, where `into` is. Errors: ConnectionError."""
        try:
            self._reader.submit(request, offset, len(into), wait_s)
        except (native.NativeError, IndexError) as error:
            raise ConnectionError(str(error)) from error

    def poll(self, timeout_s: float) -> list[native.Completion]:
        return self._reader.poll(timeout_s)

    def cancel(self) -> None:
        """Ends the connection; after it nothing is written into memory any more."""
        self._reader.cancel()
        while self._reader.poll(POLL_S):
            pass

    def release(self) -> None:
        """Nothing is outstanding, and the connection stays."""

    @property
    def error(self) -> str | None:
        return self._reader.error


class RdmaReads:
    """The connections by RDMA of one segment's fetch to one peer, kept while a read follows another. Thread-safe."""

    def __init__(self, node: NodeRdma, memory: FetchMemory, connections: PeerConnections) -> None:
        self.node = node
        self._memory = memory
        self._connections = connections
        self._lock = threading.Lock()
        self._idle: list[RdmaLink] = []
        self._timer: threading.Timer | None = None

    def take(self, peer: Peer) -> RdmaLink:
        """Errors: OSError; SourceError, SourceLost."""
        with self._lock:
            while self._idle:
                link = self._idle.pop()
                if link.grant == peer.grant and link.error is None:
                    return link
                link.cancel()
        region = self._memory.region()
        if region is None:
            raise ConnectionError("the segment is gone")
        memory = self.node.memory(region, self._memory.slab_bytes, tuple(self._memory.granted))
        connection = self._connections.take(peer, transport="rdma")
        try:
            return RdmaLink(_reader(connection.link.native_fd(), memory), peer)
        except native.NativeError as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.link.close()  # it has a descriptor of its own

    def give_back(self, link: RdmaLink) -> None:
        """Keeps a connection on which nothing is outstanding, for IDLE_S."""
        with self._lock:
            link.idle_since_s = time.monotonic()
            self._idle.append(link)
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None and self._idle:
            self._timer = threading.Timer(IDLE_S, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        with self._lock:
            until_s = time.monotonic() - IDLE_S
            old = [link for link in self._idle if link.idle_since_s <= until_s]
            self._idle = [link for link in self._idle if link.idle_since_s > until_s]
            self._timer = None
            self._start_timer()
        for link in old:
            link.cancel()


def _reader(fd: int | None, memory: RdmaMemory) -> RdmaReader:
    from fleetstart.native._rdma import RdmaReader

    if fd is None:
        raise ConnectionError("RDMA inside TLS")
    return RdmaReader(fd, memory, connect_s=CONNECT_S, silence_s=SILENCE_S, stall_s=STALL_S)
