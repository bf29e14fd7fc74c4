"""Native code (C++17): shared-memory segments, checksums, direct reads, transports between peers, and a CPU decoder for
language models.

Everything that blocks, copies or computes releases the GIL. `_core.pyi` has the types.
"""

from fleetstart.native._core import (
    Checksum,
    Completion,
    ControlBlock,
    Decoder,
    NativeError,
    Region,
    SegmentFailed,
    SlabPool,
    TcpReader,
    TcpServer,
    attach_across_kernels,
    cached_bytes,
    read_checksum,
    read_direct,
    xxh3,
)

__all__ = [
    "Checksum",
    "Completion",
    "ControlBlock",
    "Decoder",
    "NativeError",
    "Region",
    "SegmentFailed",
    "SlabPool",
    "TcpReader",
    "TcpServer",
    "attach_across_kernels",
    "cached_bytes",
    "read_checksum",
    "read_direct",
    "xxh3",
]
