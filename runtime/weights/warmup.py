"""Warm-up of tensor binding: binds a few tensors of a small segment.

A newly forked process has none of its libraries' code mapped: its first binding of two hundred tensors takes five times
as long as its second. The fork server does it once, which imports and specialises; a spare worker does it again, which
maps the code.
"""

from __future__ import annotations

import os
import time

from fleetstart.native import ControlBlock, SlabPool, xxh3

from ..contract.weights.manifest import CHUNK_BYTES, Manifest, Part, TensorEntry, manifest_bytes
from .weights import Weights

_TENSORS = 200
_DTYPES = (("F32", 4), ("BF16", 2), ("F16", 2))
_SPACING_BYTES = 64
_DEADLINE_NS = 1_000_000_000


def warm_up_weights() -> None:
    """Binds the tensors; needs torch. Uses one small page, and frees it."""
    entries = {}
    for number in range(_TENSORS):
        dtype, width_bytes = _DTYPES[number % len(_DTYPES)]
        entries[f"layers.{number}.weight"] = TensorEntry(
            number * _SPACING_BYTES, 4 * width_bytes, dtype, (2, 2), number
        )
    size_bytes = _TENSORS * _SPACING_BYTES
    region = SlabPool("warm-up", pages="small", slab_bytes=CHUNK_BYTES, capacity=1).take(CHUNK_BYTES)
    manifest = Manifest(
        total_bytes=CHUNK_BYTES,
        parts=[Part("warm-up.safetensors", 4096, size_bytes, 0)],
        chunks=[xxh3(region.view(0, size_bytes))],
        tensors=entries,
    )
    control = ControlBlock.create("warm-up", 1, manifest_bytes(manifest), 1)
    control.mark_ready(0)
    deadline_ns = time.monotonic_ns() + _DEADLINE_NS
    weights = Weights.attach(os.dup(control.fd), [os.dup(fd) for fd in region.fds], deadline_ns=deadline_ns)
    dict(weights)
