"""Stores the files of a folder as a version of a volume: what the version before it has already is not sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fleetstart import native
from fleetstart.runtime.contract.function.layer import (
    MANIFEST_OBJECT,
    LayerManifest,
    layer_bytes,
    layer_id,
    read_layer,
)
from fleetstart.runtime.contract.function.tree import list_files, stream_of, volume_manifest
from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.object_keys import volume_key

from ..fetch.errors import with_retries
from .store_writer import StoreWriter

UPLOADS = 4
"""Parts sent at a time, each of 64 MiB at most, in memory."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version whose files are in the store, and which no record names yet."""

    tree: LayerId
    manifest: LayerManifest
    data: bytes
    """The manifest's bytes."""
    new_bytes: int


class Abandoned(Exception):
    """Nobody waits for the version any more."""


def store_version(
    writer: StoreWriter, folder: Path, base: LayerManifest | None, abandoned: Callable[[], bool]
) -> StoredVersion:
    """Stores what the base lacks, the manifest last. Blocks. Errors: LayerInvalid, StoreFailed, Abandoned, OSError."""
    files = list_files(folder, strict=True)
    stream = stream_of(folder, files)
    manifest = volume_manifest(files, stream, native.xxh3)
    data = layer_bytes(manifest)
    tree = layer_id(data)
    read_layer(data, tree)  # what a node would refuse is not stored
    known = {part.object for part in base.parts} if base is not None else set()
    new_bytes = 0

    def send(name: str, offset: int, size_bytes: int) -> None:
        if abandoned():
            raise Abandoned
        _put(writer, volume_key(tree, name), b"".join(stream(offset, size_bytes)))

    with ThreadPoolExecutor(UPLOADS, thread_name_prefix=f"volume-{tree[:8]}") as pool:
        sending = []
        for name, offset, size_bytes in _new_parts(manifest, known):
            new_bytes += size_bytes
            sending.append(pool.submit(send, name, offset, size_bytes))
        for one in sending:
            one.result()
    if abandoned():
        raise Abandoned
    _put(writer, volume_key(tree, MANIFEST_OBJECT), data)
    return StoredVersion(tree, manifest, data, new_bytes)


def _new_parts(manifest: LayerManifest, known: set[str]) -> Iterator[tuple[str, int, int]]:
    """(digest, offset in the stream, size) of each part that is not known, once."""
    seen = set(known)
    offset = 0
    for part in manifest.parts:
        if part.object not in seen:
            seen.add(part.object)
            yield part.object, offset, part.size_bytes
        offset += part.size_bytes


def _put(writer: StoreWriter, key: str, data: bytes) -> None:
    def put() -> bytes:
        writer.put(key, data)
        return b""

    with_retries(put, key)
