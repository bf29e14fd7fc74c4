"""Tensors of a published checkpoint in a local folder, as the object store has it: a manifest and parts.

Parts are mapped, and each chunk is verified when the first tensor in it is read, so that a pass in the order of the
segment reads the files once.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fleetstart.native import xxh3

from ...contract.errors import CheckpointInvalid, ChecksumMismatch
from ...contract.weights.manifest import MANIFEST_OBJECT, Manifest, Part, chunk_ranges, chunks_of, read_manifest
from ...weights.views import torch_dtype

if TYPE_CHECKING:
    import torch


class CheckpointFolder(Mapping[str, "torch.Tensor"]):
    """Tensors by name, in the order of the segment, as views of the mapped parts; a write changes only this process."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the manifest and maps the parts. Errors: CheckpointInvalid for a folder that holds no checkpoint."""
        self._folder = Path(folder)
        try:
            self.manifest: Manifest = read_manifest((self._folder / MANIFEST_OBJECT).read_bytes())
        except OSError as error:
            raise CheckpointInvalid(
                f"{self._folder} has no {MANIFEST_OBJECT}: {error.strerror}",
                hint="name the folder of a published checkpoint: STORE/checkpoints/ID, with an ID of `fs weights ls`",
            ) from error
        self._parts = [(part, _mapped(self._folder / part.object, part)) for part in self.manifest.parts]
        self._ranges = {chunk.index: chunk for chunk in chunk_ranges(self.manifest)}
        self._verified: set[int] = set()
        named = {name: entry.offset for name, entry in self.manifest.tensors.items()}
        named |= {alias: named[name] for alias, name in self.manifest.aliases.items()}
        self._names = sorted(named, key=lambda name: (named[name], name in self.manifest.aliases, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor. Errors: KeyError; ChecksumMismatch for bytes that were not published."""
        import torch

        entry = self.manifest.tensors[self.manifest.aliases.get(name, name)]
        dtype = torch_dtype(entry.dtype)
        if not entry.size_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        for index in chunks_of(self.manifest, entry.offset, entry.size_bytes):
            self._verify(index)
        part, memory = self._part_at(entry.offset)
        offset = part.header_bytes + entry.offset - part.segment_offset
        # By bytes: parts begin where their headers end, which need not be a multiple of the dtype's size.
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=entry.size_bytes, offset=offset)
        if offset % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(entry.shape)

    def _part_at(self, offset: int) -> tuple[Part, mmap.mmap]:
        return next(one for one in reversed(self._parts) if one[0].segment_offset <= offset)

    def _verify(self, index: int) -> None:
        if index in self._verified:
            return
        chunk = self._ranges[index]
        _, memory = self._part_at(chunk.segment_offset)
        with memoryview(memory) as view:
            found = xxh3(view[chunk.object_offset : chunk.object_offset + chunk.size_bytes])
        if found != chunk.checksum:
            raise ChecksumMismatch(
                f"chunk {index} of {self._folder / chunk.object}: checksum {chunk.checksum:016x} expected, "
                f"{found:016x} read",
                hint="`fs weights verify ID --repair` says what is wrong and mends it",
            )
        self._verified.add(index)


def _mapped(path: Path, part: Part) -> mmap.mmap:
    """The part's file, mapped so that a write changes only this process' copy of a page."""
    wanted = part.header_bytes + part.data_bytes
    try:
        with path.open("rb") as file:
            found = path.stat().st_size
            if found == wanted:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointInvalid(f"part {path} cannot be read: {error.strerror}") from error
    raise CheckpointInvalid(f"part {path} has {found} bytes, {wanted} are published")
