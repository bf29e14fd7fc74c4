"""Bytes: shared segments, checksums, copies, and the arithmetic that runs over them, in C++17.

Everything that blocks, copies or computes releases the GIL. `_core.pyi` is the typed face.
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
