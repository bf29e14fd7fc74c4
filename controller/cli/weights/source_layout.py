"""Layout of the source files of a checkpoint, so that an export writes the same files again.

The layout is an object of its own beside the checkpoint's parts, and no part of what its id names: equal weights are
one checkpoint, however they were sharded, and the layout is that of whoever pushed them first. It holds each
safetensors file's header as it stood, and the index; what it says is believed only where it fits the manifest.
"""

from __future__ import annotations

import gzip
import re
import zlib
from io import BytesIO

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.object_keys import LAYOUT_OBJECT
from fleetstart.runtime.contract.weights.manifest import Manifest

from .local_files import GeneratedFile
from .safetensors_header import HEADER_MAX_BYTES, StoredTensor, parse_header
from .source import INDEX, Source

FORMAT = "fleetstart-layout/1"
LAYOUT_MAX_BYTES = 4 * HEADER_MAX_BYTES
"""Largest layout, uncompressed. A header of tens of thousands of tensors has a few megabytes."""

_NAME = re.compile(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]{0,254}")


class ShardHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name and header of one safetensors file."""

    name: str
    header: str
    """The safetensors header's text, padding included."""


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the layout object."""

    format: str = FORMAT
    files: list[ShardHeader]
    index: str | None = None
    """Text of model.safetensors.index.json, if there was one."""


def encode_layout(source: Source) -> bytes | None:
    """Encodes a layout, equal for equal sources. None if some tensors of the files are not in the checkpoint."""
    if not source.shards or sum(len(shard.tensors) for shard in source.shards) != len(source.tensors):
        return None
    files = [ShardHeader(shard.origin.name, shard.header.decode()) for shard in source.shards]
    layout = ShardLayout(files=files, index=None if source.index is None else source.index.decode())
    return gzip.compress(msgspec.json.encode(layout), compresslevel=6, mtime=0)


def read_layout(data: bytes, manifest: Manifest) -> tuple[ShardLayout, list[list[StoredTensor]]]:
    """Decodes a layout, and the tensors of each file.

    Errors: CheckpointInvalid if it is unreadable, leads out of a folder, or does not fit the manifest.
    """
    try:
        with gzip.open(BytesIO(data)) as stream:
            text = stream.read(LAYOUT_MAX_BYTES + 1)
        if len(text) > LAYOUT_MAX_BYTES:
            raise CheckpointInvalid(f"{LAYOUT_OBJECT} has more than {LAYOUT_MAX_BYTES} bytes unpacked")
        layout = msgspec.json.decode(text, type=ShardLayout)
    except (OSError, EOFError, zlib.error, *UNDECODABLE) as error:
        raise CheckpointInvalid(f"{LAYOUT_OBJECT} is not readable: {error}") from error
    if layout.format != FORMAT:
        raise CheckpointInvalid(f"{LAYOUT_OBJECT} has format {layout.format[:40]!r}, not {FORMAT!r}")
    tensors = [parse_header(GeneratedFile(file.name, b""), file.header.encode()) for file in layout.files]
    _check_names(layout, manifest)
    _check_tensors(tensors, manifest)
    return layout, tensors


def _check_names(layout: ShardLayout, manifest: Manifest) -> None:
    taken = {*manifest.files, INDEX}
    for file in layout.files:
        if not _NAME.fullmatch(file.name) or file.name in taken:
            raise CheckpointInvalid(f"{LAYOUT_OBJECT}: a file cannot be named {file.name[:80]!r}")
        taken.add(file.name)


def _check_tensors(files: list[list[StoredTensor]], manifest: Manifest) -> None:
    """Checks that every tensor of the manifest is in some file, and that no file's tensor differs from it."""
    missing = {*manifest.tensors, *manifest.aliases}
    for tensor in (tensor for file in files for tensor in file):
        entry = manifest.tensors.get(manifest.aliases.get(tensor.name, tensor.name))
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            raise CheckpointInvalid(f"{LAYOUT_OBJECT}: tensor {tensor.name[:80]!r} is not that of the manifest")
        missing.discard(tensor.name)
    if missing:
        raise CheckpointInvalid(f"{LAYOUT_OBJECT} lacks tensor {min(missing)[:80]!r}")
