"""Bytes: shared segments, checksums, copies, and the arithmetic that runs over them, in C++17.

Everything that blocks, copies or computes releases the GIL. `_core.pyi` is the typed face.
"""

from fleetstart.native._core import (
    ControlBlock,
    Decoder,
    NativeError,
    Region,
    SegmentFailed,
    copy_checksum,
    read_checksum,
    xxh64,
)

__all__ = [
    "ControlBlock",
    "Decoder",
    "NativeError",
    "Region",
    "SegmentFailed",
    "copy_checksum",
    "read_checksum",
    "xxh64",
]
