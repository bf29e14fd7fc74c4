"""Publishes weights as a checkpoint: computes checksums in a first pass, uploads what the store lacks in a second.

Nothing holds the whole model: both passes stream through a few buffers. The first pass gives the manifest, whose
digest names every object; so parts that the store has already are recognised, a second push of equal weights uploads
nothing, and one that goes on after a break uploads the rest. A manifest is remembered for as long as the files do not
change, so that going on begins at once. It is uploaded last: a checkpoint without a manifest does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

import msgspec
import xxhash

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import LAYOUT_OBJECT, checkpoint_key, digest_in_name
from fleetstart.runtime.contract.weights.manifest import (
    MANIFEST_OBJECT,
    Manifest,
    checkpoint_id,
    manifest_bytes,
    read_manifest,
)
from fleetstart.runtime.contract.weights.stage import LayerLayout, layout_of

from .publish_layout import PART_MAX_BYTES, CheckpointPlan, Checksums, PartPlan, plan_checkpoint
from .source import Source, read_source
from .source_layout import encode_layout
from .tied_tensors import find_tied
from .upload import CheckpointTarget, UploadObject, upload

Progress = Callable[[str, int, int], None]
"""Callback with the current step, bytes done and bytes in all."""
READERS = 4
"""Threads of the first pass: disks and object stores are faster with several, and checksums release the GIL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that is in the store."""

    id: CheckpointId
    weight_bytes: int
    uploaded_bytes: int
    """0 if the store had everything."""
    segment_bytes: int
    """Size of its segment in a node's memory."""
    layout: LayerLayout
    """Bytes of each layer."""


def publish(weights: Path, store: CheckpointTarget, *, cache: Path, progress: Progress) -> Published:
    """Publishes the weights at a path. `cache` is a folder that remembers the checksums of unchanged files.

    Errors: WeightsMissing, PickleRefused, CheckpointInvalid; what the store raises.
    """
    return publish_source(read_source(weights), store, cache=cache, progress=progress)


def publish_source(
    source: Source, store: CheckpointTarget, *, cache: Path, progress: Progress, part_max_bytes: int = PART_MAX_BYTES
) -> Published:
    memory = cache / f"{_fingerprint(source)}.manifest"
    plan, data = _remembered(memory, source, part_max_bytes) or _made(memory, source, part_max_bytes, progress)
    checkpoint = checkpoint_id(data)
    read = read_manifest(data)
    chunks = read.chunks

    def part_item(part: PartPlan, name: str) -> UploadObject:
        expected = chunks[part.segment_offset // plan.chunk_bytes :]
        key = checkpoint_key(checkpoint, name)
        return UploadObject(key, part.object_bytes, lambda: _checked(part, plan.chunk_bytes, expected))

    items = [part_item(part, named.object) for part, named in zip(plan.parts, read.parts, strict=True)]
    layout = encode_layout(source)
    if layout is not None and store.object_size(checkpoint_key(checkpoint, LAYOUT_OBJECT)) is None:
        # The first push's layout stays: later pushes may have other files, but have the same weights.
        items.append(UploadObject.of(checkpoint_key(checkpoint, LAYOUT_OBJECT), layout))
    manifest = UploadObject.of(checkpoint_key(checkpoint, MANIFEST_OBJECT), data)
    sent = upload(items, manifest, store, progress, announce=lambda: store.begin_upload(data))
    return Published(
        id=checkpoint,
        weight_bytes=plan.weight_bytes,
        uploaded_bytes=sent,
        segment_bytes=read.total_bytes,
        layout=layout_of(read),
    )


def _made(memory: Path, source: Source, part_max_bytes: int, progress: Progress) -> tuple[CheckpointPlan, bytes]:
    plan = plan_checkpoint(source, find_tied(source.tensors, layers=source.layers), part_max_bytes=part_max_bytes)
    data = manifest_bytes(plan.manifest(checksums(plan, progress)))
    _remember(memory, data)
    return plan, data


def checksums(plan: CheckpointPlan, progress: Progress) -> Checksums:
    """First pass: checksum and digest of every chunk of the segment, and the digest of every part, in order."""
    total = sum(part.data_bytes for part in plan.parts)
    done = 0
    lock = Lock()

    def sums_of(part: PartPlan) -> tuple[list[int], list[str], str]:
        nonlocal done
        hasher = _ChunkHasher(plan.chunk_bytes, digests=True)
        whole = sha256(part.header)
        for block in read_data(part):
            hasher.update(block)
            whole.update(block)
            with lock:
                done += len(block)
                progress("checksums", done, total)
        return hasher.finish(), hasher.digests, whole.hexdigest()

    pool = ThreadPoolExecutor(min(READERS, len(plan.parts)))
    try:
        found = list(pool.map(sums_of, plan.parts))
        return Checksums(
            chunks=[checksum for sums, _, _ in found for checksum in sums],
            digests=[digest for _, digests, _ in found for digest in digests],
            parts=[whole for _, _, whole in found],
        )
    finally:
        pool.shutdown(cancel_futures=True)


def read_data(part: PartPlan) -> Iterator[bytes]:
    """Reads a part's data section in blocks. Errors: CheckpointInvalid if a source file has changed."""
    for piece in part.pieces:
        if piece.file is None:
            yield bytes(piece.size_bytes)
        else:
            yield from piece.file.blocks(piece.file_offset, piece.size_bytes)


def _checked(part: PartPlan, chunk_bytes: int, expected: Sequence[int]) -> Iterator[bytes]:
    """The part's bytes, header first; fails before its last block if they are not those of the first pass."""
    yield part.header
    hasher = _ChunkHasher(chunk_bytes)
    held = b""
    for block in read_data(part):
        hasher.update(block)
        if held:
            yield held
        held = block
    if (sums := hasher.finish()) != list(expected[: len(sums)]):
        raise CheckpointInvalid("the weights changed while they were uploaded", hint="run the same command again")
    yield held


class _ChunkHasher:
    """Cuts a stream of blocks into chunks and keeps the checksum of each; with `digests`, its SHA-256 too."""

    def __init__(self, chunk_bytes: int, *, digests: bool = False) -> None:
        self.digests: list[str] = []
        self._chunk_bytes = chunk_bytes
        self._sums: list[int] = []
        self._hash = xxhash.xxh3_64()
        self._digest = sha256() if digests else None
        self._chunk_left_bytes = chunk_bytes

    def update(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            piece = view[: self._chunk_left_bytes]
            self._hash.update(piece)
            if self._digest is not None:
                self._digest.update(piece)
            self._chunk_left_bytes -= len(piece)
            view = view[len(piece) :]
            if self._chunk_left_bytes == 0:
                self._close()

    def finish(self) -> list[int]:
        if self._chunk_left_bytes < self._chunk_bytes:
            self._close()
        return self._sums

    def _close(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash.reset()
        if self._digest is not None:
            self.digests.append(self._digest.hexdigest())
            self._digest = sha256()
        self._chunk_left_bytes = self._chunk_bytes


def _fingerprint(source: Source) -> str:
    """Changes whenever a source file could have."""
    return sha256(msgspec.json.encode([origin.facts() for origin in source.source_files()])).hexdigest()


def _remembered(memory: Path, source: Source, part_max_bytes: int) -> tuple[CheckpointPlan, bytes] | None:
    """The plan and the manifest of an earlier first pass; None if it is not that of a plan as it is made now."""
    try:
        data = memory.read_bytes()
        manifest = read_manifest(data)
    except (OSError, CheckpointInvalid):
        return None
    if not manifest.aliases.keys() <= {tensor.name for tensor in source.tensors}:
        return None
    plan = plan_checkpoint(source, manifest.aliases, part_max_bytes=part_max_bytes)
    if not manifest.is_protected or len(manifest.parts) != len(plan.parts):
        return None
    return (plan, data) if manifest_bytes(plan.manifest(_checksums_in(manifest))) == data else None


def _checksums_in(manifest: Manifest) -> Checksums:
    parts = [digest_in_name(part.object) for part in manifest.parts]
    return Checksums(chunks=manifest.chunks, digests=manifest.digests, parts=parts)


def _remember(memory: Path, data: bytes) -> None:
    """The cache only saves time, so a cache that cannot be written is no error."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(memory)
    except OSError:
        return
