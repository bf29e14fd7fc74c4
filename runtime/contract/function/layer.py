"""The manifest of a layer: installed Python packages that a deploy built, and where their bytes lie in the store.

A version of a volume (`volume`) is stored in the same way, built for no Python.

The files of a layer, one after the other in the order of their paths, are a stream. The stream is cut into *parts*,
which are objects of the store, and into *chunks*, each with a checksum, as the weights of a checkpoint are, and with a
digest. The digest of the manifest's bytes is the layer's id: equal packages are one layer, stored and sent once,
whoever deploys them, and nobody who can write to the store can change them unseen.

A manifest is untrusted: `read_layer` refuses every path that could lead out of the layer's folder.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from ..decoding import UNDECODABLE
from ..errors import LayerInvalid
from ..ids import LayerId
from ..object_keys import is_digest
from ..sizes import GIB, MIB

FORMAT = "fleetstart-layer/1"
LAYER_DIR = "/layer"
"""Where a confined worker sees its layer, whatever its isolation."""
MANIFEST_OBJECT = "manifest.json"
CHUNK_BYTES = 4 * MIB
"""As of weights: large enough for full speed, small enough that several arrive side by side."""
PART_BYTES = 64 * MIB
"""Largest object: an upload that breaks repeats one of them at most."""
MANIFEST_MAX_BYTES = 32 * MIB
FILES_MAX = 200_000
"""Ten times the files of torch and all that it needs."""
LAYER_MAX_BYTES = 32 * GIB
PATH_MAX_BYTES = 1024


class LayerFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file: its path inside the layer, its size, whether it may be executed."""

    path: str
    size_bytes: int
    executable: bool = False


class LayerPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One object of the store: the next `size_bytes` of the stream."""

    object: str
    """Its name below the layer; or its digest, for an object of its own that others may share."""
    size_bytes: int


class LayerManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str = FORMAT
    python: str
    """The Python that it was built for, such as "cpython-311"; empty: none, for files of a volume."""
    platform: str
    """The platform that it was built for, such as "linux-x86_64"; empty: any."""
    lock: str
    """Exact versions and hashes of its packages, as they were installed."""
    chunk_bytes: int = CHUNK_BYTES
    files: list[LayerFile]
    parts: list[LayerPart]
    chunks: list[int]
    """xxh3-64 of each chunk of the stream: finds accidents."""
    digests: list[str] = []
    """SHA-256 of each chunk, in hex: finds forgeries. None in layers that were built before there were digests."""

    @property
    def total_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class LayerRange(msgspec.Struct, frozen=True):
    """Source of a chunk: its place in the stream, and its range in an object."""

    index: int
    object: str
    object_bytes: int
    object_offset: int
    offset: int
    size_bytes: int
    checksum: int
    digest: str = ""
    """SHA-256 in hex; empty if the manifest has none."""


def layer_ranges(manifest: LayerManifest) -> list[LayerRange]:
    """The ranges of all chunks in the order of the stream. Parts begin with a chunk."""
    ranges: list[LayerRange] = []
    offset = 0
    for part in manifest.parts:
        for begin in range(0, part.size_bytes, manifest.chunk_bytes):
            index = len(ranges)
            ranges.append(
                LayerRange(
                    index=index,
                    object=part.object,
                    object_bytes=part.size_bytes,
                    object_offset=begin,
                    offset=offset + begin,
                    size_bytes=min(manifest.chunk_bytes, part.size_bytes - begin),
                    checksum=manifest.chunks[index],
                    digest=manifest.digests[index] if manifest.digests else "",
                )
            )
        offset += part.size_bytes
    return ranges


def parts_of(total_bytes: int, part_bytes: int = PART_BYTES) -> list[LayerPart]:
    """Cuts a stream into parts."""
    sizes = [min(part_bytes, total_bytes - begin) for begin in range(0, total_bytes, part_bytes)]
    return [LayerPart(f"part-{number:05}", size) for number, size in enumerate(sizes)]


def layer_bytes(manifest: LayerManifest) -> bytes:
    """The manifest's one canonical form, whose digest is the layer's id. Errors: LayerInvalid, if it is too large."""
    data = msgspec.json.encode(manifest, order="deterministic")
    if len(data) > MANIFEST_MAX_BYTES:
        raise LayerInvalid(f"a layer's manifest has {MANIFEST_MAX_BYTES:,} bytes at most, this has {len(data):,}")
    return data


def layer_id(data: bytes) -> LayerId:
    return LayerId(hashlib.sha256(data).hexdigest())


def top_level(entries: Iterable[str]) -> frozenset[str]:
    """Names of the modules that a folder with these entries has: packages, `six.py`, `_core.cpython-311-x86_64.so`."""
    names = (entry.partition(".")[0] if entry.endswith((".py", ".so")) else entry for entry in entries)
    return frozenset(name for name in names if name.isidentifier() and name != "__pycache__")


def own_python() -> str:
    """The running Python, as a manifest names it."""
    return sys.implementation.cache_tag or sys.implementation.name


def own_platform() -> str:
    """The running platform, as a manifest names it."""
    return sysconfig.get_platform()


def packages_for(python: str, platform: str) -> str:
    """A Python and a platform in words: "cpython-311 on linux-x86_64"; empty if they are not known."""
    return f"{python} on {platform}" if python else ""


_MANIFEST = msgspec.json.Decoder(LayerManifest)
"""Made once, at import: msgspec crashes where two threads are the first to decode a type."""


def read_layer(data: bytes, layer: LayerId | None = None) -> LayerManifest:
    """Reads and checks a manifest. Errors: LayerInvalid, which names the first thing that is wrong."""
    if layer is not None and layer_id(data) != layer:
        raise LayerInvalid(f"layer {layer[:12]}: its manifest has the digest {layer_id(data)[:12]}")
    name = f"layer {(layer or layer_id(data))[:12]}"
    try:
        manifest = _MANIFEST.decode(data)
    except UNDECODABLE as error:
        raise LayerInvalid(f"{name}: its manifest cannot be read: {error}") from error
    for problem in _problems(manifest):
        raise LayerInvalid(f"{name}: {problem}")
    return manifest


def _problems(manifest: LayerManifest) -> Iterator[str]:
    if manifest.format != FORMAT:
        yield f"format {manifest.format[:40]!r} is not {FORMAT!r}"
    if not 4096 <= manifest.chunk_bytes <= 64 * MIB or manifest.chunk_bytes % 4096:
        yield f"chunks of {manifest.chunk_bytes} bytes: 4096 to 64 MiB, in whole pages"
    if len(manifest.files) > FILES_MAX:
        yield f"{len(manifest.files)} files, {FILES_MAX} at most"
    for file in manifest.files:
        if not _is_inside(file.path):
            yield f"file {file.path[:200]!r} has a path that is not allowed"
        if file.size_bytes < 0:
            yield f"file {file.path[:200]!r} has {file.size_bytes} bytes"
    yield from _clashes([file.path for file in manifest.files])
    for number, part in enumerate(manifest.parts):
        shared = is_digest(part.object)
        if not shared and part.object != f"part-{number:05}":
            yield f"part {number} is called {part.object[:80]!r}"
        whole = shared or part.size_bytes % manifest.chunk_bytes == 0 or number == len(manifest.parts) - 1
        if part.size_bytes <= 0 or not whole:
            yield f"{part.object} has {part.size_bytes} bytes, which is no number of whole chunks"
    if manifest.total_bytes > LAYER_MAX_BYTES:
        yield f"{manifest.total_bytes:,} bytes, {LAYER_MAX_BYTES:,} at most"
    if manifest.total_bytes != sum(file.size_bytes for file in manifest.files):
        yield f"its parts have {manifest.total_bytes:,} bytes, its files others"
    wanted = sum(-(-part.size_bytes // manifest.chunk_bytes) for part in manifest.parts)
    if len(manifest.chunks) != wanted:
        yield f"{len(manifest.chunks)} checksums for {wanted} chunks"
    if not all(0 <= checksum < 1 << 64 for checksum in manifest.chunks):
        yield "a checksum is no number of 64 bits"
    if manifest.digests and len(manifest.digests) != wanted:
        yield f"{len(manifest.digests)} digests for {wanted} chunks"
    if not all(map(is_digest, manifest.digests)):
        yield "a digest is no SHA-256 in hex"


def check_path(path: str) -> None:
    """Checks the path of a file. Errors: LayerInvalid."""
    if not _is_inside(path):
        raise LayerInvalid(f"file {path[:200]!r} has a path that is not allowed")


def _is_inside(path: str) -> bool:
    """Checks whether a path has named parts only, none of which leads upward."""
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError:
        return False
    return (
        0 < size_bytes <= PATH_MAX_BYTES
        and not any(ord(letter) < 32 for letter in path)
        and all(part not in ("", ".", "..") for part in path.split("/"))
    )


def _clashes(paths: list[str]) -> Iterator[str]:
    """Paths out of order, named twice, or both a file and a folder."""
    ordered = [path.split("/") for path in paths]
    for former, path in pairwise(ordered):
        if former >= path:
            yield f"file {'/'.join(path)[:200]!r} is out of order or named twice"
        if path[: len(former)] == former:
            yield f"{'/'.join(former)[:200]!r} is a file and a folder"
