"""What a node puts a checkpoint's bytes into: memory and control block, filled chunk by chunk."""

from __future__ import annotations

import os
import time
from math import prod

from fleetstart.native import ControlBlock, SlabPool, xxh3
from fleetstart.runtime.contract.weights.manifest import (
    ALIGNMENT_BYTES,
    DTYPE_BYTES,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    manifest_bytes,
)
from fleetstart.runtime.weights.weights import Weights

CHUNK = 4096
SLAB = 2 * CHUNK
"""Small, so that most segments lie in several."""


class Segment:
    """One checkpoint of random bytes, in the order of the names given; `contents` sets some of them."""

    def __init__(
        self,
        tensors: dict[str, tuple[str, tuple[int, ...]]],
        files: dict[str, bytes] | None = None,
        contents: dict[str, bytes] | None = None,
        aliases: dict[str, str] | None = None,
        chunk_bytes: int = CHUNK,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.entries: dict[str, TensorEntry] = {}
        offset = 0
        for layer, (name, (dtype, shape)) in enumerate(tensors.items()):
            size = prod(shape) * DTYPE_BYTES[dtype]
            self.entries[name] = TensorEntry(offset, size, dtype, shape, layer)
            offset = -(-(offset + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        file_entries = {}
        for name, content in (files or {}).items():
            file_entries[name] = FileEntry(offset, len(content))
            offset += len(content)
        total = -(-max(offset, 1) // chunk_bytes) * chunk_bytes
        self.data = bytearray(os.urandom(total))
        for name, content in (files or {}).items():
            begin = file_entries[name].offset
            self.data[begin : begin + len(content)] = content
        for name, content in (contents or {}).items():
            begin = self.entries[name].offset
            self.data[begin : begin + len(content)] = content
        self.manifest = Manifest(
            chunk_bytes=chunk_bytes,
            total_bytes=total,
            parts=[Part("part-0.safetensors", CHUNK, total, 0)],
            chunks=[xxh3(self.data[begin : begin + chunk_bytes]) for begin in range(0, total, chunk_bytes)],
            tensors=self.entries,
            files=file_entries,
            aliases=aliases or {},
        )
        slab_bytes = SLAB // CHUNK * chunk_bytes
        pool = SlabPool("test", pages="small", slab_bytes=slab_bytes, capacity=-(-total // slab_bytes))
        self.region = pool.take(total)
        self.control = ControlBlock.create("test", total // chunk_bytes, manifest_bytes(self.manifest), 1)

    @property
    def fds(self) -> tuple[int, ...]:
        """What a worker is given of it."""
        return (self.control.fd, *self.region.fds)

    @property
    def chunks(self) -> range:
        return range(self.control.chunk_count)

    def fill(self, *chunks: int) -> None:
        for chunk in chunks:
            begin = chunk * self.chunk_bytes
            self.region.view(begin, self.chunk_bytes)[:] = self.data[begin : begin + self.chunk_bytes]
            self.control.mark_ready(chunk)

    def attach(self, *, timeout_s: float = 30.0) -> Weights:
        """As a worker has it that was started just now."""
        deadline_ns = time.monotonic_ns() + round(timeout_s * 1e9)
        control_fd, *data_fds = map(os.dup, self.fds)
        return Weights.attach(control_fd, data_fds, deadline_ns=deadline_ns)

    def close(self) -> None:
        """The owner's end: its mapping and its descriptors are gone, as when the node lets a checkpoint go."""
        del self.region, self.control

    def expected(self, name: str) -> bytes:
        entry = self.entries[self.manifest.aliases.get(name, name)]
        return bytes(self.data[entry.offset : entry.offset + entry.size_bytes])
