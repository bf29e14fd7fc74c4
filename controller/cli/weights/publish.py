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
from fleetstart.runtime.contract.object_keys import checkpoint_key
from fleetstart.runtime.contract.weights.manifest import MANIFEST_OBJECT, checkpoint_id, manifest_bytes, read_manifest
from fleetstart.runtime.contract.weights.stage import LayerLayout, layout_of

from .publish_layout import PART_MAX_BYTES, CheckpointPlan, PartPlan, plan_checkpoint
from .source import Source, read_source
from .source_layout import LAYOUT_OBJECT, encode_layout
from .tied_tensors import find_tied
from .upload import UploadObject, UploadTarget, upload

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


def publish(weights: Path, store: UploadTarget, *, cache: Path, progress: Progress) -> Published:
    """Publishes the weights at a path. `cache` is a folder that remembers the checksums of unchanged files.

    Errors: WeightsMissing, PickleRefused, CheckpointInvalid; what the store raises.
    """
    return publish_source(read_source(weights), store, cache=cache, progress=progress)


def publish_source(
    source: Source, store: UploadTarget, *, cache: Path, progress: Progress, part_max_bytes: int = PART_MAX_BYTES
) -> Published:
    memory = cache / f"{_fingerprint(source)}.manifest"
    plan, data = _remembered(memory, source, part_max_bytes) or _made(memory, source, part_max_bytes, progress)
    checkpoint = checkpoint_id(data)
    read = read_manifest(data)
    chunks = read.chunks

    def part_item(part: PartPlan) -> UploadObject:
        expected = chunks[part.segment_offset // plan.chunk_bytes :]
        key = checkpoint_key(checkpoint, part.object)
        return UploadObject(key, part.object_bytes, lambda: _checked(part, plan.chunk_bytes, expected))

    items = [part_item(part) for part in plan.parts]
    layout = encode_layout(source)
    if layout is not None and store.object_size(checkpoint_key(checkpoint, LAYOUT_OBJECT)) is None:
        # The first push's layout stays: later pushes may have other files, but have the same weights.
        items.append(UploadObject.of(checkpoint_key(checkpoint, LAYOUT_OBJECT), layout))
    manifest = UploadObject.of(checkpoint_key(checkpoint, MANIFEST_OBJECT), data)
    sent = upload(items, manifest, store, progress)
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


def checksums(plan: CheckpointPlan, progress: Progress) -> list[int]:
    """First pass: xxh3-64 of every chunk of the segment, in order."""
    total = sum(part.data_bytes for part in plan.parts)
    done = 0
    lock = Lock()

    def sums_of(part: PartPlan) -> list[int]:
        nonlocal done
        hasher = _ChunkHasher(plan.chunk_bytes)
        for block in read_data(part):
            hasher.update(block)
            with lock:
                done += len(block)
                progress("checksums", done, total)
        return hasher.finish()

    pool = ThreadPoolExecutor(min(READERS, len(plan.parts)))
    try:
        return [checksum for sums in pool.map(sums_of, plan.parts) for checksum in sums]
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
    """Cuts a stream of blocks into chunks and keeps the checksum of each."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._sums: list[int] = []
        self._hash = xxhash.xxh3_64()
        self._chunk_left_bytes = chunk_bytes

    def update(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            piece = view[: self._chunk_left_bytes]
            self._hash.update(piece)
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
    return (plan, data) if manifest_bytes(plan.manifest(manifest.chunks)) == data else None


def _remember(memory: Path, data: bytes) -> None:
    """The cache only saves time, so a cache that cannot be written is no error."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(memory)
    except OSError:
        return
