"""Builds the layer of a function's requirements, and publishes it. What was built or sent before is not again.

A cache on this machine remembers which lock requirements have and which layer a lock gives. A layer whose manifest is
in the store is there whole, so a deploy with known requirements runs no build and sends nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import xxhash

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import BuildFailed, InvalidInput
from fleetstart.runtime.contract.function.layer import (
    CHUNK_BYTES,
    LAYER_MAX_BYTES,
    MANIFEST_OBJECT,
    LayerFile,
    LayerManifest,
    LayerPart,
    layer_bytes,
    layer_id,
    own_platform,
    own_python,
    parts_of,
    read_layer,
    top_level,
)
from fleetstart.runtime.contract.function.tree import in_chunks, list_files, stream_of
from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.object_keys import layer_key

from ..weights.upload import UploadObject, UploadTarget, upload
from .build import UNPACK_LIMITS, constraints, install, packages_of, resolve
from .index_settings import build_environment, pip_settings
from .requirements import Requirements
from .unpacking import UnpackLimits

Log = Callable[[str], object]
Progress = Callable[[str, int, int], None]
WORKSPACE = ".build-"
"""Beginning of the names of folders in which builds are under way."""
FORMAT = "2"
"""Changes with the way in which layers are built, so that what was built otherwise is not taken for it."""


class BuiltLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that was built on this machine, as its cache remembers it."""

    id: LayerId
    lock: str
    size_bytes: int
    packages: list[str]
    modules: list[str]
    """Names of its top-level modules."""


@dataclass(frozen=True, slots=True)
class PublishedLayer:
    """A layer that is in the store."""

    layer: BuiltLayer
    uploaded_bytes: int
    """0 if the store had it."""


def publish_layer(
    needed: Requirements,
    store: UploadTarget,
    *,
    cache: Path,
    environ: Mapping[str, str],
    log: Log,
    progress: Progress,
    secrets: Collection[str] = (),
    upgrade: bool = False,
    limits: UnpackLimits = UNPACK_LIMITS,
) -> PublishedLayer:
    """Publishes the layer of requirements. `secrets`: names of variables that the build does not see. With `upgrade`,
    packages without exact versions are looked for again. `limits` are those on what packages may unpack to.

    Errors: BuildFailed; what the store raises.
    """
    memory = cache / "layers"
    asked = memory / f"{needed.digest(FORMAT, own_python(), own_platform(), constraints())}.json"
    known = None if upgrade else _recall(asked)
    if known is not None and _has(store, known.id):
        return PublishedLayer(known, 0)
    memory.mkdir(parents=True, exist_ok=True)
    with _workspace(memory) as work:
        env = build_environment(environ, pip_settings(environ, Path.home()), secrets)
        log(f"{needed.origin}: building the layer of its packages")
        lock = known.lock if known is not None else resolve(needed, work, env, log, limits)
        locked = memory / f"lock-{_digest(FORMAT, own_python(), own_platform(), lock)}.json"
        same = _recall(locked)
        if same is not None and _has(store, same.id):
            _remember(asked, same)
            return PublishedLayer(same, 0)
        built, sent = _build(install(needed, lock, work, env, log, limits), lock, store, progress)
        _remember(locked, built)
        _remember(asked, built)
        return PublishedLayer(built, sent)


@contextlib.contextmanager
def _workspace(memory: Path) -> Iterator[Path]:
    """A folder for one build, held by a lock that ends with this process. Removes those of builds that were killed."""
    for left in memory.glob(f"{WORKSPACE}*"):
        with contextlib.suppress(OSError):
            if (held := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=memory))
    held = _lock(made)
    work = made.rename(memory / f"{WORKSPACE}{made.name[1:]}")  # locked before anybody else looks at it
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if held is not None:
            os.close(held)


def _lock(folder: Path) -> int | None:
    """Descriptor that holds the folder's lock; None if another process has it. Errors: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _build(folder: Path, lock: str, store: UploadTarget, progress: Progress) -> tuple[BuiltLayer, int]:
    """Publishes an installed folder; returns the layer and the bytes sent."""
    files = _list_files(folder)
    stream = stream_of(folder, files)
    manifest = manifest_of(folder, files, lock, progress)
    data = layer_bytes(manifest)
    layer = layer_id(data)
    read_layer(data, layer)  # what a node would refuse is not sent
    items: list[UploadObject] = []
    offset = 0
    for part in manifest.parts:
        key = layer_key(layer, part.object)
        items.append(UploadObject(key, part.size_bytes, partial(stream, offset, part.size_bytes)))
        offset += part.size_bytes
    sent = upload(items, UploadObject.of(layer_key(layer, MANIFEST_OBJECT), data), store, progress)
    modules = sorted(top_level({file.path.partition("/")[0] for file in files}))
    built = BuiltLayer(
        id=layer, lock=lock, size_bytes=manifest.total_bytes, packages=packages_of(lock), modules=modules
    )
    return built, sent


def _list_files(folder: Path) -> list[LayerFile]:
    """The files of the packages. Errors: BuildFailed."""
    try:
        found = list_files(folder)
    except InvalidInput as error:
        raise BuildFailed(f"the installed packages: {error.message}") from error
    total = sum(file.size_bytes for file in found)
    if total > LAYER_MAX_BYTES:
        raise BuildFailed(f"the packages have {total:,} bytes, {LAYER_MAX_BYTES:,} at most")
    return found


def manifest_of(folder: Path, files: list[LayerFile], lock: str, progress: Progress) -> LayerManifest:
    """Computes the checksums of an installed folder."""
    total = sum(file.size_bytes for file in files)
    read = stream_of(folder, files)
    parts: list[LayerPart] = []
    chunks: list[int] = []
    digests: list[str] = []
    offset = 0
    for part in parts_of(total):
        whole = sha256()
        for chunk in in_chunks(read(offset, part.size_bytes), CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(xxhash.xxh3_64_intdigest(chunk))
            digests.append(sha256(chunk).hexdigest())
            progress("checksums", min(total, len(chunks) * CHUNK_BYTES), total)
        parts.append(LayerPart(whole.hexdigest(), part.size_bytes))  # so that the store checks it when it comes
        offset += part.size_bytes
    return LayerManifest(
        python=own_python(),
        platform=own_platform(),
        lock=lock,
        files=files,
        parts=parts,
        chunks=chunks,
        digests=digests,
    )


def _has(store: UploadTarget, layer: LayerId) -> bool:
    """Checks whether the store has the whole layer: its manifest is published last."""
    return store.object_size(layer_key(layer, MANIFEST_OBJECT)) is not None


def _digest(*texts: str) -> str:
    return sha256(msgspec.json.encode(texts)).hexdigest()


def _recall(path: Path) -> BuiltLayer | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BuiltLayer)
    except (OSError, *UNDECODABLE):
        return None


def _remember(path: Path, built: BuiltLayer) -> None:
    """The cache only saves time, so a cache that cannot be written is no error."""
    try:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(built))
        temporary.replace(path)
    except OSError:
        return
