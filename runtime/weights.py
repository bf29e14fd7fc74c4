"""A checkpoint's tensors as a mapping, zero-copy over the node's shared memory, while they still arrive.

`weights["name"]` waits until every chunk of that tensor is there and verified, then gives a view of it:
no tensor exists without its bytes. A failed segment raises its own error at once; a slow one raises after
the worker's start deadline. Iteration is in the segment's order, in which layers run and chunks arrive,
so `model.load_state_dict(weights, assign=True)` and a plain loop both follow the stream. A further name of
a tensor (tied weights) comes right after it and gives the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from fleetstart.native import ControlBlock, Region
from fleetstart.runtime.arrival import Arrival
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError
from fleetstart.runtime.contract.manifest import (
    DTYPE_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    chunks_of,
    read_manifest,
)
from fleetstart.runtime.tensors import Tensors, unknown

if TYPE_CHECKING:
    import torch

# DLPack has no 8-bit float that every torch release reads: they cross as bytes and are viewed.
_VIEWED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


class Weights(Tensors):
    """Tensors by name. They are views: a write to one changes this worker's copy of the page alone."""

    def __init__(self, manifest: Manifest, region: Region, control: ControlBlock, *, deadline_ns: int) -> None:
        self.manifest = manifest
        self.region = region
        self.arrival = Arrival(control, deadline_ns)
        self._entries = _in_order(manifest)

    @classmethod
    def attach(cls, control_fd: int, region_fd: int, *, deadline_ns: int) -> Weights:
        """Takes over both descriptors. `deadline_ns` is monotonic: the last moment to wait for a chunk.

        Errors: CheckpointInvalid if manifest, control block and memory do not fit one another.
        """
        control = ControlBlock.attach(control_fd)
        region = Region.attach(region_fd)
        manifest = read_manifest(control.manifest)
        if manifest.total_bytes != region.size_bytes or len(manifest.chunks) != control.chunk_count:
            raise CheckpointInvalid(
                f"the manifest tells of {manifest.total_bytes} bytes in {len(manifest.chunks)} chunks, "
                f"the segment has {region.size_bytes} bytes in {control.chunk_count}"
            )
        return cls(manifest, region, control, deadline_ns=deadline_ns)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entry(name)
        return self._view(name, entry, entry.offset, entry.shape)

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        entry = self.entry(name)
        row_bytes = prod(entry.shape[1:]) * DTYPE_BYTES[entry.dtype]
        return self._view(name, entry, entry.offset + begin * row_bytes, (end - begin, *entry.shape[1:]))

    def _view(self, name: str, entry: TensorEntry, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        size_bytes = prod(shape) * DTYPE_BYTES[entry.dtype]
        if size_bytes == 0:
            return torch.empty(shape, dtype=torch_dtype(entry.dtype))
        self._wait(name, offset, size_bytes)
        viewed = _VIEWED.get(entry.dtype)
        capsule = self.region.dlpack(offset, shape, "U8" if viewed else entry.dtype)
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return tensor.view(getattr(torch, viewed)) if viewed else tensor

    def entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise unknown("tensor", name, self._entries)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Knows the names without waiting for the bytes."""
        return name in self._entries

    def __repr__(self) -> str:
        ready, chunks = self.arrival.ready_count, self.arrival.chunk_count
        return f"Weights({len(self)} tensors, {self.manifest.weight_bytes:,} bytes, {ready} of {chunks} chunks ready)"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.manifest.files)

    def file_view(self, name: str) -> memoryview:
        entry: FileEntry | None = self.manifest.files.get(name)
        if entry is None:
            raise unknown("file", name, self.manifest.files)
        self._wait(name, entry.offset, entry.size_bytes)
        return self.region.view(entry.offset, entry.size_bytes)

    def map_ahead(self) -> None:
        """Maps chunks as they become ready, in a thread, so that the first pass over the weights faults on no page.

        One call a chunk takes a third of the time that its thousand faults take, and takes it beside the start. The
        thread ends with the last chunk, or with the segment's failure, which those tell who read.
        """
        threading.Thread(target=self._map, name="map-weights", daemon=True).start()

    def _map(self) -> None:
        chunk_bytes = self.manifest.chunk_bytes
        for chunk in range(self.arrival.chunk_count):
            try:
                self.arrival.wait("mapping ahead", range(chunk, chunk + 1))
                self.region.populate(chunk * chunk_bytes, chunk_bytes)
            except (FleetError, OSError):
                return

    def wait(self) -> None:
        """Returns when every chunk is there."""
        self._wait("the whole checkpoint", 0, self.manifest.total_bytes)

    def _wait(self, name: str, offset: int, size_bytes: int) -> None:
        self.arrival.wait(name, chunks_of(self.manifest, offset, size_bytes))


def _in_order(manifest: Manifest) -> dict[str, TensorEntry]:
    """The manifest's canonical form has its names sorted; what arrives first is what lies first."""
    entries = [(entry.offset, False, name, entry) for name, entry in manifest.tensors.items()]
    for alias, name in manifest.aliases.items():
        entry = manifest.tensors[name]
        entries.append((entry.offset, True, alias, entry))
    return {name: entry for _, _, name, entry in sorted(entries, key=lambda one: one[:3])}


def torch_dtype(name: str) -> torch.dtype:
    """Of a dtype's safetensors name."""
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
        "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    }  # fmt: skip
    found: torch.dtype = getattr(torch, _VIEWED.get(name) or names[name])
    return found
