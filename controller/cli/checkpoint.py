"""Publishes weights as a checkpoint: checksums in a first pass, an upload of what the store lacks in a second.

Nothing holds the whole model: both passes stream through one buffer. The first pass gives the manifest, whose
digest names every object; so parts that the store has already are recognised, and a second deploy of equal
weights uploads nothing. The manifest goes last: a checkpoint without one does not exist for anybody.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import xxhash

from fleetstart.controller.cli.checkpoint_plan import PartPlan, Plan, make_plan
from fleetstart.controller.cli.checkpoint_source import Source, read_source
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.manifest import MANIFEST_OBJECT, checkpoint_id, checkpoint_key, manifest_bytes

BLOCK_BYTES = 1024 * 1024
"""One read and one piece of an upload: large enough to be cheap, small enough for a smooth bar."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


class ObjectStore(Protocol):
    """What publishing needs of the store; `Server` is one."""

    def object_size(self, key: str) -> int | None: ...

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    id: CheckpointId
    weight_bytes: int
    uploaded_bytes: int
    """0 if the store had everything."""


def publish(weights: Path, store: ObjectStore, *, cache: Path, progress: Progress) -> Published:
    """Brings the weights behind the path into the store. `cache` is a folder that remembers ids of unchanged files.

    Errors: WeightsMissing, PickleRefused, CheckpointInvalid; what the store raises.
    """
    source = read_source(weights)
    plan = make_plan(source)
    weight_bytes = sum(tensor.size_bytes for tensor in source.tensors)
    memory = cache / f"{_fingerprint(source)}.id"
    known = _remembered(memory)
    if known is not None and _is_whole(known, plan, store):
        return Published(id=known, weight_bytes=weight_bytes, uploaded_bytes=0)
    chunks = checksums(plan, progress)
    data = manifest_bytes(plan.manifest(chunks))
    checkpoint = checkpoint_id(data)
    uploaded = _upload(checkpoint, data, plan, chunks, store, progress)
    _remember(memory, checkpoint)
    return Published(id=checkpoint, weight_bytes=weight_bytes, uploaded_bytes=uploaded)


def checksums(plan: Plan, progress: Progress) -> list[int]:
    """xxh64 of every chunk of the segment, in order: the first pass."""
    total = sum(part.data_bytes for part in plan.parts)
    sums: list[int] = []
    done = 0
    for part in plan.parts:
        hasher = _ChunkHasher(plan.chunk_bytes)
        for block in read_data(part):
            hasher.update(block)
            done += len(block)
            progress("checksums", done, total)
        sums.extend(hasher.finish())
    return sums


def read_data(part: PartPlan) -> Iterator[bytes]:
    """The part's data section, in blocks. CheckpointInvalid if a source file has become shorter."""
    with ExitStack() as stack:
        streams: dict[Path, BinaryIO] = {}
        for piece in part.pieces:
            if piece.file is None:
                yield bytes(piece.size_bytes) if piece.made is None else piece.made
                continue
            if piece.file not in streams:
                streams[piece.file] = stack.enter_context(piece.file.open("rb", buffering=0))
            for begin in range(0, piece.size_bytes, BLOCK_BYTES):
                wanted = min(BLOCK_BYTES, piece.size_bytes - begin)
                block = os.pread(streams[piece.file].fileno(), wanted, piece.file_offset + begin)
                if len(block) != wanted:
                    raise CheckpointInvalid(f"{piece.file} became shorter while it was read")
                yield block


def _upload(
    checkpoint: CheckpointId,
    manifest: bytes,
    plan: Plan,
    chunks: Sequence[int],
    store: ObjectStore,
    progress: Progress,
) -> int:
    manifest_key = checkpoint_key(checkpoint, MANIFEST_OBJECT)
    missing = [
        part for part in plan.parts if store.object_size(checkpoint_key(checkpoint, part.object)) != part.object_bytes
    ]
    if not missing and store.object_size(manifest_key) == len(manifest):
        return 0
    total = sum(part.object_bytes for part in missing)
    done = 0

    def sent(block: bytes) -> bytes:
        nonlocal done
        done += len(block)
        progress("upload", done, total)
        return block

    for part in missing:
        first = part.segment_offset // plan.chunk_bytes
        content = _checked(part, plan.chunk_bytes, chunks[first:])
        store.put_object(checkpoint_key(checkpoint, part.object), map(sent, content), part.object_bytes)
    store.put_object(manifest_key, manifest, len(manifest))
    return total + len(manifest)


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
        raise CheckpointInvalid("the weights changed while they were uploaded", hint="deploy again")
    yield held


class _ChunkHasher:
    """Cuts a stream of blocks into chunks and keeps the checksum of each."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._sums: list[int] = []
        self._hash = xxhash.xxh64()
        self._room = chunk_bytes

    def update(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            piece = view[: self._room]
            self._hash.update(piece)
            self._room -= len(piece)
            view = view[len(piece) :]
            if self._room == 0:
                self._close()

    def finish(self) -> list[int]:
        if self._room < self._chunk_bytes:
            self._close()
        return self._sums

    def _close(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash.reset()
        self._room = self._chunk_bytes


def _is_whole(checkpoint: CheckpointId, plan: Plan, store: ObjectStore) -> bool:
    """Whether the store has the manifest and every part at its size."""
    return store.object_size(checkpoint_key(checkpoint, MANIFEST_OBJECT)) is not None and all(
        store.object_size(checkpoint_key(checkpoint, part.object)) == part.object_bytes for part in plan.parts
    )


def _fingerprint(source: Source) -> str:
    """Changes whenever a source file could have: path, size, time of change and inode of each."""
    stats = [(str(path.resolve()), path.stat()) for path in source.paths()]
    facts = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for path, stat in stats]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _remembered(memory: Path) -> CheckpointId | None:
    try:
        text = memory.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return CheckpointId(text) if len(text) == 64 and text.isalnum() else None


def _remember(memory: Path, checkpoint: CheckpointId) -> None:
    """The cache only saves time, so a cache that cannot be written is no error."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_suffix(f".{os.getpid()}")
        temporary.write_text(checkpoint)
        temporary.replace(memory)
    except OSError:
        return
