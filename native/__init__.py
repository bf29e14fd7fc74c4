"""Native code (C++17): shared-memory segments, checksums, direct reads, and a CPU decoder for Llama models.

Everything that blocks, copies or computes releases the GIL. `_core.pyi` has the types.
"""

from fleetstart.native._core import (
    Checksum,
    ControlBlock,
    Decoder,
    NativeError,
    Region,
    SegmentFailed,
    SlabPool,
    attach_across_kernels,
    cached_bytes,
    read_checksum,
    read_direct,
    xxh3,
)

__all__ = [
    "Checksum",
    "ControlBlock",
    "Decoder",
    "NativeError",
    "Region",
    "SegmentFailed",
    "SlabPool",
    "attach_across_kernels",
    "cached_bytes",
    "read_checksum",
    "read_direct",
    "xxh3",
]
