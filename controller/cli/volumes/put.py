"""Makes a version of a volume out of a folder: what the newest version has already is not sent again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import xxhash

from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.function.layer import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    LayerManifest,
    layer_bytes,
    layer_id,
    read_layer,
)
from fleetstart.runtime.contract.function.tree import list_files, stream_of, volume_manifest
from fleetstart.runtime.contract.function.volume import VolumeVersion
from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.node.volume_stream import check_announced
from fleetstart.runtime.contract.object_keys import volume_key

from ...schemas.volumes import NewVolumeVersion, VolumeInfo
from ..api_client import ApiClient
from ..weights.upload import UploadObject, upload

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PutVersion:
    """A version that was put."""

    version: VolumeVersion
    sent_bytes: int
    made: bool
    """False if the newest version has these files already."""


def volume_path(name: str) -> str:
    """Path of a volume in the API."""
    return f"/api/v1/volumes/{quote(name, safe='')}"


def put_folder(server: ApiClient, name: str, folder: Path, progress: Progress) -> PutVersion:
    """Puts a folder as the next version of a volume, which is created if there is none.

    Errors: NotFound, InvalidInput, TooLarge, Conflict if another version came meanwhile.
    """
    if not folder.is_dir():
        raise NotFound(f"{folder} is no folder", hint="a version of a volume is the content of a folder")
    files = list_files(folder, strict=True)
    total_bytes = sum(file.size_bytes for file in files)
    check_announced(len(files), total_bytes)
    info = server.put(volume_path(name), {}, VolumeInfo)
    newest = info.versions[-1] if info.versions else None
    stream = stream_of(folder, files)
    manifest = volume_manifest(
        files, stream, xxhash.xxh3_64_intdigest, lambda done: progress("checksums", done, total_bytes)
    )
    data = layer_bytes(manifest)
    tree = layer_id(data)
    read_layer(data, tree)  # what a node would refuse is not sent
    if newest is not None and newest.tree == tree:
        return PutVersion(newest, 0, made=False)
    known = {part.object for part in read_manifest(server, newest.tree).parts} if newest is not None else set()
    items = {}
    offset = 0
    for part in manifest.parts:
        if part.object not in known and part.object not in items:
            content = partial(stream, offset, part.size_bytes)
            items[part.object] = UploadObject(volume_key(tree, part.object), part.size_bytes, content)
        offset += part.size_bytes
    last = UploadObject.of(volume_key(tree, MANIFEST_OBJECT), data)
    sent_bytes = upload(list(items.values()), last, server, progress)
    new = NewVolumeVersion(
        tree=tree,
        base=newest.number if newest is not None else 0,
        new_bytes=sum(item.size_bytes for item in items.values()),
    )
    info = server.post(f"{volume_path(name)}/versions", new, VolumeInfo)
    version = next(one for one in reversed(info.versions) if one.tree == tree)
    return PutVersion(version, sent_bytes, made=True)


def read_manifest(server: ApiClient, tree: LayerId) -> LayerManifest:
    """Reads the manifest of a version. Errors: NotFound, LayerInvalid."""
    data = server.read_object(volume_key(tree, MANIFEST_OBJECT), MANIFEST_MAX_BYTES)
    if data is None:
        raise NotFound(f"the manifest {tree[:12]} is not in the store", hint="put the folder again")
    return read_layer(data, tree)


def as_json(put: PutVersion, name: str) -> dict[str, object]:
    return {
        "name": name,
        "made": put.made,
        "sent_bytes": put.sent_bytes,
        **msgspec.to_builtins(put.version),
    }
