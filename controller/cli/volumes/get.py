"""Writes a version of a volume into a new or empty folder, verified: its files appear when all are right."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetstart.runtime.contract.errors import ChecksumMismatch, InvalidInput
from fleetstart.runtime.contract.function.layer import LayerManifest
from fleetstart.runtime.contract.function.volume import VolumeVersion
from fleetstart.runtime.contract.object_keys import volume_key

from ..api_client import ApiClient
from .put import read_manifest

Progress = Callable[[str, int, int], None]
PARTIAL = ".partial"


def get_version(server: ApiClient, version: VolumeVersion, folder: Path, progress: Progress) -> LayerManifest:
    """Writes the files of a version. An empty folder stays the same one, as it may be a mount, or where a shell is.
    Errors: InvalidInput if the folder has files, or the temporary one is there; ChecksumMismatch, OSError."""
    exists = folder.exists()
    if exists and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} exists and is not empty", hint="name a new folder")
    manifest = read_manifest(server, version.tree)
    temporary = folder / f".{os.getpid()}{PARTIAL}" if exists else folder.with_name(folder.name + PARTIAL)
    try:
        temporary.mkdir(parents=True)
    except FileExistsError as error:
        raise InvalidInput(
            f"{temporary} exists, where the files would be until they are verified",
            hint="remove it, if a `fs volume get` that was killed has left it there",
        ) from error
    try:
        _write(temporary, manifest, _verified(server, version, manifest, progress))
        if exists:
            for path in temporary.iterdir():
                path.rename(folder / path.name)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _verified(
    server: ApiClient, version: VolumeVersion, manifest: LayerManifest, progress: Progress
) -> Iterator[bytes]:
    """The stream of the files' bytes. Errors: ChecksumMismatch after a part that is not what its name says."""
    done_bytes = 0
    for part in manifest.parts:
        digest = hashlib.sha256()
        for block in server.read_range(volume_key(version.tree, part.object), 0, part.size_bytes):
            digest.update(block)
            done_bytes += len(block)
            progress("download", done_bytes, manifest.total_bytes)
            yield block
        if digest.hexdigest() != part.object:
            raise ChecksumMismatch(
                f"part {part.object[:12]} of version {version.number} has the digest {digest.hexdigest()[:12]}",
                hint="the object in the store is damaged: put the folder again under a new volume",
            )


def _write(folder: Path, manifest: LayerManifest, stream: Iterator[bytes]) -> None:
    held = b""
    for file in manifest.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        left = file.size_bytes
        with path.open("xb") as opened:
            while left:
                held = held or next(stream)
                opened.write(held[:left])
                left, held = left - min(left, len(held)), held[left:]
        if file.executable:
            path.chmod(0o755)
    for _ in stream:  # the last part is verified after its last byte
        pass
