"""What both guests do alike: a segment's memory with a known content, registered with the guest's RDMA device."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetstart.native import ControlBlock, Region, SlabPool
from fleetstart.prefetcher.peers.rdma import NodeRdma, open_rdma

if TYPE_CHECKING:
    from fleetstart.native._rdma import RdmaMemory

HOLDER, READER = "198.18.0.1", "198.18.0.2"
COMMANDS_PORT = 7000
SLAB_BYTES = 2 << 20
CHUNK_BYTES = 256 << 10
CHUNKS = 28
"""Three and a half slabs: the last one is part of the region to its middle."""
REGION_BYTES = CHUNKS * CHUNK_BYTES
SLABS = -(-REGION_BYTES // SLAB_BYTES)
CONNECT_S = 60.0
TRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Range:
    """A chunk's range of the region."""

    number: int
    offset: int
    size_bytes: int


def content(chunk: int) -> bytes:
    """The chunk's bytes: of a cycle whose length divides no power of two, from a place of its own."""
    cycle = bytes(range(251))
    begin = chunk * 37 % 251
    return (cycle * (CHUNK_BYTES // 251 + 2))[begin : begin + CHUNK_BYTES]


def new_pool() -> tuple[SlabPool, NodeRdma]:
    """A node's pool with room for two regions, and its device, which each process opens for itself: one that was opened
    before a fork is of no use after it."""
    rdma = open_rdma()
    assert rdma is not None, "no usable device"
    return SlabPool("rdma", pages="small", slab_bytes=SLAB_BYTES, capacity=2 * SLABS), rdma


def new_region(pool: SlabPool, rdma: NodeRdma) -> tuple[Region, RdmaMemory]:
    """Memory of a pool of slabs, as segments have it, all registered."""
    region = pool.take(REGION_BYTES)
    return region, rdma.memory(region, SLAB_BYTES, range(SLABS))


def fill(region: Region) -> None:
    for chunk in range(CHUNKS):
        region.view(chunk * CHUNK_BYTES, CHUNK_BYTES)[:] = content(chunk)


def new_control(ready: range) -> ControlBlock:
    control = ControlBlock.create("rdma", CHUNKS, b"{}", 1)
    for chunk in ready:
        control.mark_ready(chunk)
    return control


def is_content(region: Region, chunk: int) -> bool:
    return region.view(chunk * CHUNK_BYTES, CHUNK_BYTES) == content(chunk)


def connect(port: int) -> socket.socket:
    """A connection to the holder's guest, which may still be starting."""
    until_s = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((HOLDER, port), timeout=TRY_S)  # a packet that is lost is soon sent again
        except OSError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.05)
        else:
            sock.settimeout(CONNECT_S)
            return sock
