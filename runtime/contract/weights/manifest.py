"""The manifest of a checkpoint: place of each tensor in store and segment, and the checksum of each chunk.

A checkpoint is a few *parts*, each a valid safetensors file that any tool opens. Their data sections,
laid one after the other and each begun at a multiple of the chunk size, are the *segment*: offsets of
tensors are offsets in it. A *chunk* is one fixed-size piece of the segment; it lies in exactly one
part, so that it is one range of one object. The digest of the manifest's bytes is the checkpoint's id. A part's
name has the SHA-256 of its bytes, which the store checks when the part comes; each chunk has one, which nodes check.
Tensors lie in the order in which layers run, so a stage is one contiguous range (ServerlessLLM
section 4.1; HydraServe section 4.1).

Small files that belong to a model (config.json, tokenizer.json) travel in the first part, as U8
tensors named by file: one path and one checksum for everything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from math import prod

import msgspec

from ..decoding import UNDECODABLE
from ..errors import CheckpointInvalid
from ..ids import CheckpointId
from ..object_keys import digest_in_name, is_digest, is_object_name

FORMAT = "fleetstart-checkpoint/2"
CHECKSUM = "xxh3-64"
"""The quickest of those that were measured (README), in the cache as fast as a copy. It guards against accidents and
can be forged; `digests` guard against forgery."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Large enough that a range request or direct read runs at full speed, small enough to overlap well."""
ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of this in the segment: a cache line, enough for every vector load."""
MANIFEST_MAX_BYTES = 64 * 1024 * 1024
SEGMENT_MAX_BYTES = 1 << 44
LAYER_BEFORE = -1
"""Layer number of files and of what runs before the first layer (embeddings)."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

LAYER_NAME = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|block_list)\.(\d+)(?:\.|$)")
"""Names of tensors that belong to a numbered layer; group 1 is its number."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`offset` and `size_bytes` in the segment; `layer` is LAYER_BEFORE, 0.., or one past the last for the head."""

    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    layer: int


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: int
    size_bytes: int


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A safetensors object of the checkpoint: `header_bytes` of header, then `data_bytes` of data."""

    object: str
    header_bytes: int
    data_bytes: int
    segment_offset: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str = FORMAT
    checksum: str = CHECKSUM
    """Hash function of the chunks' checksums, with seed 0."""
    chunk_bytes: int = CHUNK_BYTES
    total_bytes: int
    """Size of the segment: the end of the last part, rounded up to whole chunks."""
    parts: list[Part]
    chunks: list[int]
    """Checksum of each chunk of the segment, over the bytes that its part has there."""
    digests: list[str] = []
    """SHA-256 of the same bytes, in hex. None in checkpoints that were published before there were digests."""
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry] = {}
    aliases: dict[str, str] = {}
    """Further names of tensors, such as those of tied weights: each is read where the tensor that it names lies."""
    layers: int | msgspec.UnsetType = msgspec.UNSET
    """Number of layers, if it was given at publishing because the tensors' names do not tell (LAYER_NAME)."""

    @property
    def weight_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.tensors.values())

    @property
    def is_protected(self) -> bool:
        """Checks whether digests cover all bytes, so that a forged part is found."""
        return bool(self.digests) and all(digest_in_name(part.object) for part in self.parts)


class ChunkRange(msgspec.Struct, frozen=True):
    """Source and destination of a chunk: its range in an object and in the segment."""

    index: int
    object: str
    object_offset: int
    segment_offset: int
    size_bytes: int
    checksum: int
    digest: str = ""
    """SHA-256 in hex; empty if the manifest has none."""


def chunk_ranges(manifest: Manifest) -> list[ChunkRange]:
    """The ranges of all chunks in segment order, which is the order of use."""
    ranges: list[ChunkRange] = []
    for part in manifest.parts:
        for begin in range(0, part.data_bytes, manifest.chunk_bytes):
            offset = part.segment_offset + begin
            index = offset // manifest.chunk_bytes
            ranges.append(
                ChunkRange(
                    index=index,
                    object=part.object,
                    object_offset=part.header_bytes + begin,
                    segment_offset=offset,
                    size_bytes=min(manifest.chunk_bytes, part.data_bytes - begin),
                    checksum=manifest.chunks[index],
                    digest=manifest.digests[index] if manifest.digests else "",
                )
            )
    return ranges


def chunks_of(manifest: Manifest, offset: int, size_bytes: int) -> range:
    """Indices of the chunks that hold the bytes `[offset, offset + size_bytes)`; none for no bytes."""
    if size_bytes == 0:
        return range(0)
    return range(offset // manifest.chunk_bytes, (offset + size_bytes - 1) // manifest.chunk_bytes + 1)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The one canonical form, whose digest is the checkpoint's id."""
    return msgspec.json.encode(manifest, order="deterministic")


def checkpoint_id(data: bytes) -> CheckpointId:
    return CheckpointId(hashlib.sha256(data).hexdigest())


MANIFEST_OBJECT = "manifest.json"


def read_manifest(data: bytes, expected: CheckpointId | None = None) -> Manifest:
    """Decodes and validates a manifest; after this no offset in it can lead outside the segment.

    Errors: CheckpointInvalid, naming the entry; the ways to be wrong are the checks below and no others.
    """
    if len(data) > MANIFEST_MAX_BYTES:
        raise CheckpointInvalid(f"manifest has {len(data)} bytes, {MANIFEST_MAX_BYTES} at most")
    if expected is not None and (found := checkpoint_id(data)) != expected:
        raise CheckpointInvalid(
            f"manifest of {expected[:12]} has digest {found[:12]}: not the bytes that were published"
        )
    manifest = decode_manifest(data)
    _check_head(manifest)
    data_ranges = _check_parts(manifest)
    _check_entries(manifest, data_ranges)
    if isinstance(manifest.layers, int) and not 0 <= manifest.layers <= len(manifest.tensors):
        raise CheckpointInvalid(f"{manifest.layers} layers of {len(manifest.tensors)} tensors")
    for name, tensor in manifest.aliases.items():
        if tensor not in manifest.tensors or name in manifest.tensors or name in manifest.files:
            raise CheckpointInvalid(f"alias {name!r} of {tensor!r} is taken or leads nowhere")
    return manifest


_MANIFEST = msgspec.json.Decoder(Manifest)
"""Made once, at import: msgspec crashes where two threads are the first to decode a type."""


def decode_manifest(data: bytes) -> Manifest:
    """Decodes a manifest that was validated before: checks types only, in a third of the time."""
    try:
        return _MANIFEST.decode(data)
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"manifest is not readable: {error}") from error


def _check_head(manifest: Manifest) -> None:
    if manifest.format != FORMAT:
        raise CheckpointInvalid(f"manifest format {manifest.format!r} is not {FORMAT!r}")
    if manifest.checksum != CHECKSUM:
        raise CheckpointInvalid(f"checksum {manifest.checksum!r} is not known")
    # So that a chunk lies in one slab of memory, on whole pages, whatever the slabs' size.
    if not 4096 <= manifest.chunk_bytes <= CHUNK_BYTES or manifest.chunk_bytes & (manifest.chunk_bytes - 1):
        raise CheckpointInvalid(f"chunk size {manifest.chunk_bytes} must be a power of two from 4096 to {CHUNK_BYTES}")
    if not 0 <= manifest.total_bytes <= SEGMENT_MAX_BYTES or manifest.total_bytes % manifest.chunk_bytes:
        raise CheckpointInvalid(f"segment size {manifest.total_bytes} is not a whole number of chunks within limits")
    if len(manifest.chunks) != manifest.total_bytes // manifest.chunk_bytes:
        raise CheckpointInvalid(
            f"{len(manifest.chunks)} checksums for {manifest.total_bytes // manifest.chunk_bytes} chunks"
        )
    if any(not 0 <= checksum < 1 << 64 for checksum in manifest.chunks):
        raise CheckpointInvalid("a chunk's checksum is not a 64-bit number")
    if manifest.digests and len(manifest.digests) != len(manifest.chunks):
        raise CheckpointInvalid(f"{len(manifest.digests)} digests for {len(manifest.chunks)} chunks")
    if not all(map(is_digest, manifest.digests)):
        raise CheckpointInvalid("a chunk's digest is not a SHA-256 in hex")


def _check_parts(manifest: Manifest) -> list[tuple[int, int]]:
    """The parts' data ranges in the segment, after checking that they tile it in order."""
    end = 0
    names: set[str] = set()
    ranges: list[tuple[int, int]] = []
    for part in manifest.parts:
        if not is_object_name(part.object) or part.object == MANIFEST_OBJECT or part.object in names:
            raise CheckpointInvalid(f"part name {part.object!r} is not allowed or stands twice")
        names.add(part.object)
        if part.data_bytes <= 0 or part.header_bytes < 8 or part.header_bytes > 1 << 30:
            raise CheckpointInvalid(f"part {part.object}: header {part.header_bytes}, data {part.data_bytes} bytes")
        if part.segment_offset != end:
            raise CheckpointInvalid(f"part {part.object} begins at {part.segment_offset}, expected {end}")
        data_end = part.segment_offset + part.data_bytes
        ranges.append((part.segment_offset, data_end))
        end = -(-data_end // manifest.chunk_bytes) * manifest.chunk_bytes
        if end > manifest.total_bytes:
            break
    if end != manifest.total_bytes:
        raise CheckpointInvalid(f"parts end at {end}, the segment at {manifest.total_bytes}")
    return ranges


def _check_entries(manifest: Manifest, data_ranges: list[tuple[int, int]]) -> None:
    """Tensors and files: sizes that fit their shapes, inside one part, never over one another."""
    spans: list[tuple[int, int, str]] = []
    for name, entry in manifest.tensors.items():
        width = DTYPE_BYTES.get(entry.dtype)
        if width is None:
            raise CheckpointInvalid(f"tensor {name}: dtype {entry.dtype!r} is not known")
        if len(entry.shape) > 64 or any(not 0 <= dim < 1 << 63 for dim in entry.shape):
            raise CheckpointInvalid(f"tensor {name}: shape {list(entry.shape)[:8]} is not allowed")
        if prod(entry.shape) * width != entry.size_bytes:
            raise CheckpointInvalid(
                f"tensor {name}: shape and dtype need {prod(entry.shape) * width} bytes, has {entry.size_bytes}"
            )
        if entry.offset % ALIGNMENT_BYTES:
            raise CheckpointInvalid(f"tensor {name} begins at {entry.offset}, not at a multiple of {ALIGNMENT_BYTES}")
        spans.append((entry.offset, entry.offset + entry.size_bytes, name))
    for name, file in manifest.files.items():
        if not _FILE.fullmatch(name) or file.size_bytes < 0:
            raise CheckpointInvalid(f"file {name!r} with {file.size_bytes} bytes is not allowed")
        spans.append((file.offset, file.offset + file.size_bytes, name))
    _check_disjoint_inside(sorted(span for span in spans if span[0] != span[1]), data_ranges)
    if any(begin < 0 or begin > manifest.total_bytes for begin, _, _ in spans):
        raise CheckpointInvalid("an empty entry lies outside the segment")


def _check_disjoint_inside(spans: Iterable[tuple[int, int, str]], data_ranges: list[tuple[int, int]]) -> None:
    parts = iter(data_ranges)
    part_begin, part_end = next(parts, (0, 0))
    last_end, last_name = 0, "the beginning"
    for begin, end, name in spans:
        if begin < last_end:
            raise CheckpointInvalid(f"{name} overlaps {last_name}")
        while begin >= part_end:
            following = next(parts, None)
            if following is None:
                break
            part_begin, part_end = following
        if begin < part_begin or end > part_end:
            raise CheckpointInvalid(f"{name} lies at {begin} to {end}, outside every part")
        last_end, last_name = end, name
