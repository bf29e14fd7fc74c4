"""Segments of models as they are saved: of a torch module's tensors, of a folder in the style of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES
from tests.runtime.segments import CHUNK, Segment

DTYPES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
LARGE_BYTES = 8 * 1024 * 1024
"""From this size on, a segment has chunks as large as a node's: a slab is a descriptor, of which a process has few."""
SUFFIXES = (".json", ".txt", ".jinja")


def segment_of(tensors: Mapping[str, Tensor], files: dict[str, bytes] | None = None) -> Segment:
    """A full segment; a name whose memory another name has is its alias."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    contents: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (owner := first.setdefault(tensor.data_ptr(), name)) != name:
            aliases[name] = owner
            continue
        shapes[name] = (DTYPES[tensor.dtype], tuple(tensor.shape))
        contents[name] = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    large = sum(map(len, contents.values())) >= LARGE_BYTES
    segment = Segment(shapes, files, contents, aliases, CHUNK_BYTES if large else CHUNK)
    segment.fill(*segment.chunks)
    return segment


def segment_of_folder(folder: Path) -> Segment:
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES}
    return segment_of(load_file(folder / "model.safetensors"), files)
