"""Verifies a checkpoint: reads it through the server chunk by chunk, and compares checksums and digests with the
manifest. A damaged part can be removed, so that a push of the same weights sends it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock

import msgspec
import xxhash

from fleetstart.runtime.contract.errors import CheckpointInvalid, NotFound
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import checkpoint_key
from fleetstart.runtime.contract.weights.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    ChunkRange,
    Manifest,
    Part,
    chunk_ranges,
    read_manifest,
)

from ..api_client import ApiClient
from .local_files import GeneratedFile
from .safetensors_header import parse_header

READERS = 4
"""Parts that are read in parallel."""

Progress = Callable[[str, int, int], None]


class CorruptRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a part that differs from the manifest."""

    object: str
    offset: int
    size_bytes: int
    expected: str
    """Checksum in hex, or another expectation in words."""
    found: str

    def __str__(self) -> str:
        end = self.offset + self.size_bytes
        return f"{self.object} bytes {self.offset:,} to {end:,}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk as it was read."""

    range: ChunkRange
    data: bytes
    found: int
    """Checksum of the data."""
    digest: str = ""
    """SHA-256 of the data; empty if the manifest has none."""

    @property
    def bad(self) -> CorruptRange | None:
        if self.found != self.range.checksum:
            return self._corrupt(f"{self.range.checksum:016x}", f"{self.found:016x}")
        if self.digest != self.range.digest:
            return self._corrupt(f"SHA-256 {self.range.digest[:16]}", f"{self.digest[:16]}, with an equal checksum")
        return None

    def _corrupt(self, expected: str, found: str) -> CorruptRange:
        chunk = self.range
        return CorruptRange(
            object=chunk.object,
            offset=chunk.object_offset,
            size_bytes=chunk.size_bytes,
            expected=expected,
            found=found,
        )


def open_checkpoint(server: ApiClient, checkpoint: CheckpointId) -> Manifest:
    """Reads a checkpoint's manifest. Errors: NotFound; CheckpointInvalid if it is not the one that the id names."""
    data = server.read_object(checkpoint_key(checkpoint, MANIFEST_OBJECT), MANIFEST_MAX_BYTES)
    if data is None:
        raise NotFound(f"checkpoint {checkpoint[:12]} is not in the store", hint="`fs weights ls` lists what is")
    return read_manifest(data, checkpoint)


def read_part(server: ApiClient, checkpoint: CheckpointId, manifest: Manifest, part: Part) -> Iterator[Chunk]:
    """Reads the chunks of a part in order, corrupt ones too."""
    ranges = iter([one for one in chunk_ranges(manifest) if one.object == part.object])
    held = bytearray()
    for block in server.read_range(checkpoint_key(checkpoint, part.object), part.header_bytes, part.data_bytes):
        held += block
        while len(held) >= manifest.chunk_bytes:
            yield _chunk(next(ranges), bytes(held[: manifest.chunk_bytes]))
            del held[: manifest.chunk_bytes]
    if held:
        yield _chunk(next(ranges), bytes(held))


def _chunk(expected: ChunkRange, data: bytes) -> Chunk:
    digest = sha256(data).hexdigest() if expected.digest else ""
    return Chunk(range=expected, data=data, found=xxhash.xxh3_64_intdigest(data), digest=digest)


def for_each_part(manifest: Manifest, work: Callable[[Part], None]) -> None:
    """Works on several parts in parallel; raises the first failure."""
    pool = ThreadPoolExecutor(READERS)
    try:
        for _ in pool.map(work, manifest.parts):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def remove_parts(server: ApiClient, checkpoint: CheckpointId, bad: Iterable[CorruptRange]) -> list[str]:
    """Removes the damaged parts that are in the store; returns their names. Errors: Forbidden without an admin's
    key."""
    names = sorted({one.object for one in bad})
    found = [name for name in names if server.object_size(checkpoint_key(checkpoint, name)) is not None]
    for name in found:
        server.delete(f"/api/v1/checkpoints/{checkpoint}/parts/{name}", dict[str, str])
    return found


def verify(server: ApiClient, checkpoint: CheckpointId, progress: Progress) -> list[CorruptRange]:
    """Reads the whole checkpoint, and returns what is corrupt, in the order of parts. Errors: NotFound,
    CheckpointInvalid."""
    manifest = open_checkpoint(server, checkpoint)
    total = sum(part.data_bytes for part in manifest.parts)
    bad: dict[str, list[CorruptRange]] = {part.object: [] for part in manifest.parts}
    done = 0
    lock = Lock()

    def check(part: Part) -> None:
        nonlocal done
        size_bytes = part.header_bytes + part.data_bytes
        found = server.object_size(checkpoint_key(checkpoint, part.object))
        if found != size_bytes:
            actual = "no such object" if found is None else f"{found:,} bytes"
            bad[part.object].append(
                CorruptRange(
                    object=part.object, offset=0, size_bytes=size_bytes, expected=f"{size_bytes:,} bytes", found=actual
                )
            )
            return
        if (wrong := _wrong_header(server, checkpoint, manifest, part)) is not None:
            bad[part.object].append(wrong)
        for chunk in read_part(server, checkpoint, manifest, part):
            if (wrong := chunk.bad) is not None:
                bad[part.object].append(wrong)
            with lock:
                done += len(chunk.data)
                progress("checksums", done, total)

    for_each_part(manifest, check)
    return [one for part in manifest.parts for one in bad[part.object]]


def _wrong_header(server: ApiClient, checkpoint: CheckpointId, manifest: Manifest, part: Part) -> CorruptRange | None:
    """Checks a part's header. No checksum covers it, since no worker reads it; other tools that open the part do."""
    data = b"".join(server.read_range(checkpoint_key(checkpoint, part.object), 0, part.header_bytes))
    actual = ""
    if int.from_bytes(data[:8], "little") != len(data) - 8:
        actual = f"a header of {int.from_bytes(data[:8], 'little')} bytes"
    else:
        try:
            rows = {tensor.name: tensor for tensor in parse_header(GeneratedFile(part.object, b""), data[8:])}
        except CheckpointInvalid as error:
            actual = error.message
        else:
            for name, entry in manifest.tensors.items():
                begin = entry.offset - part.segment_offset
                if not (entry.size_bytes and 0 <= begin < part.data_bytes):
                    continue
                row = rows.get(name)
                if row is None or (row.dtype, row.shape, row.offset) != (entry.dtype, entry.shape, len(data) + begin):
                    actual = f"another tensor {name!r}"
                    break
    if not actual:
        return None
    return CorruptRange(
        object=part.object, offset=0, size_bytes=len(data), expected="a header as the manifest has it", found=actual
    )
