"""A checkpoint's tensors as a mapping, zero-copy over the node's shared memory, while they still arrive.

`weights["name"]` waits until every chunk of that tensor is there and verified, then gives a view of it:
no tensor exists without its bytes. A failed segment raises its own error at once; a slow one raises after
the worker's start deadline. Iteration is in the segment's order, in which layers run and chunks arrive,
so `model.load_state_dict(weights, assign=True)` and a plain loop both follow the stream.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fleetstart.native import ControlBlock, Region, SegmentFailed
from fleetstart.runtime.contract.errors import CheckpointInvalid, DeadlineExceeded, ErrorInfo, error_from
from fleetstart.runtime.contract.manifest import FileEntry, Manifest, chunks_of, read_manifest

if TYPE_CHECKING:
    import torch

# DLPack has no 8-bit float that every torch release reads: they cross as bytes and are viewed.
_VIEWED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


class Weights(Mapping[str, "torch.Tensor"]):
    """Tensors by name. They are views: a write to one changes this worker's copy of the page alone."""

    def __init__(self, manifest: Manifest, region: Region, control: ControlBlock, *, deadline_ns: int) -> None:
        self.manifest = manifest
        self._region = region
        self._control = control
        self._deadline_ns = deadline_ns
        # The manifest's canonical form has its names sorted; what arrives first is what lies first.
        self._names = sorted(manifest.tensors, key=lambda name: (manifest.tensors[name].offset, name))

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
        import torch

        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise KeyError(_unknown("tensor", name, self.manifest.tensors))
        self._wait(name, entry.offset, entry.size_bytes)
        viewed = _VIEWED.get(entry.dtype)
        if entry.size_bytes == 0:
            return torch.empty(entry.shape, dtype=_torch_dtype(entry.dtype))
        capsule = self._region.dlpack(entry.offset, entry.shape, "U8" if viewed else entry.dtype)
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return tensor.view(getattr(torch, viewed)) if viewed else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Knows the names without waiting for the bytes."""
        return name in self.manifest.tensors

    def __repr__(self) -> str:
        ready, chunks = self._control.ready_count, self._control.chunk_count
        return f"Weights({len(self)} tensors, {self.manifest.weight_bytes:,} bytes, {ready} of {chunks} chunks ready)"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the small files that belong to the model: config.json, tokenizer.json."""
        return tuple(self.manifest.files)

    def file(self, name: str) -> bytes:
        """A file's bytes, once they are there."""
        return bytes(self.file_view(name))

    def file_view(self, name: str) -> memoryview:
        """The same where it lies, read-only; it keeps the memory alive."""
        entry: FileEntry | None = self.manifest.files.get(name)
        if entry is None:
            raise KeyError(_unknown("file", name, self.manifest.files))
        self._wait(name, entry.offset, entry.size_bytes)
        return self._region.view(entry.offset, entry.size_bytes)

    def map_ahead(self) -> None:
        """Maps chunks as they become ready, in a thread, so that the first pass over the weights faults on no page.

        One call a chunk takes a third of the time that its thousand faults take, and takes it beside the start. The
        thread ends with the last chunk, or with the segment's failure, which those tell who read.
        """
        threading.Thread(target=self._map, name="map-weights", daemon=True).start()

    def _map(self) -> None:
        chunk_bytes = self.manifest.chunk_bytes
        for chunk in range(self._control.chunk_count):
            timeout_s = max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)
            try:
                self._control.wait(chunk, chunk, timeout_s)
                self._region.populate(chunk * chunk_bytes, chunk_bytes)
            except (SegmentFailed, TimeoutError, OSError):
                return

    def wait(self) -> None:
        """Returns when every chunk is there."""
        self._wait("the whole checkpoint", 0, self.manifest.total_bytes)

    def _wait(self, name: str, offset: int, size_bytes: int) -> None:
        chunks = chunks_of(self.manifest, offset, size_bytes)
        if not chunks:
            return
        timeout_s = max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            self._control.wait(chunks[0], chunks[-1], timeout_s)
        except SegmentFailed as error:
            code, message = error.args
            raise error_from(ErrorInfo(code=code, message=message)) from error
        except TimeoutError as error:
            ready, count = self._control.ready_count, self._control.chunk_count
            raise DeadlineExceeded(
                f"{name}: chunks {chunks[0]} to {chunks[-1]} had not come by the worker's start deadline; "
                f"{ready} of {count} chunks are there",
                hint="raise start_timeout_s, or look at the node's link to the object store",
            ) from error


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
        "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    }  # fmt: skip
    found: torch.dtype = getattr(torch, _VIEWED.get(name) or names[name])
    return found


def _unknown(what: str, name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    nearest = ", ".join(repr(other) for other in near) or "none that is like it"
    return f"the checkpoint has no {what} {name!r}; it has {len(known)}, the nearest: {nearest}"
