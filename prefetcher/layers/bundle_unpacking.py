"""Unpacking of bundles, which are untrusted: a tar, plain or gzipped, of files and folders.

Anything else in it (links, devices, paths that leave the folder) is rejected, and nothing of it is kept: a bundle
appears by one rename, or not at all. What it takes to check it after a boot of the machine lies beside its files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from fleetstart.runtime.contract.errors import InvalidSpec, LayerInvalid, TooLarge
from fleetstart.runtime.contract.sizes import MIB

from .boot_check import check_after_boot, mark_whole

UNPACKED_MAX_BYTES = 1024 * MIB
MEMBERS_MAX = 20_000
PATH_MAX_BYTES = 1024
HEADER_MAX_BYTES = 16 * 1024
"""Longest header of a member. Long names and PAX attributes are headers, which `tarfile` reads whole."""
FILES = "files"
SIZES = "sizes.json"
"""Bytes of each file, for the check after a boot."""
TEMPORARY = ".new-"


def unpack(data: bytes, target: Path) -> Path:
    """Unpacks beside the target, then renames; returns the folder of the files. A target that exists already is left
    as it is."""
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    files = temporary / FILES
    files.mkdir(mode=0o755, parents=True)
    try:
        packed = io.BytesIO(data)
        file = _TarStream(gzip.GzipFile(fileobj=packed) if data[:2] == b"\x1f\x8b" else packed)
        with tarfile.open(fileobj=file, mode="r:") as tar:  # type: ignore[call-overload]
            _unpack_members(tar, file, files)
        (temporary / SIZES).write_text(json.dumps(_sizes(files)))
        mark_whole(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        return target / FILES
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
        raise InvalidSpec(f"bundle {target.name[:12]} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sizes(files: Path) -> dict[str, int]:
    """Bytes of each file, by its path below the folder."""
    return {
        os.path.relpath(os.path.join(folder, name), files): os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(files)
        for name in names
    }


def is_whole(path: Path) -> bool:
    """Checks a bundle of an earlier daemon: it was unpacked to its end, and no power loss has cut it since."""
    try:
        sizes: dict[str, int] = json.loads((path / SIZES).read_text())
        check_after_boot(path, path / FILES, sizes.items())
    except (OSError, LayerInvalid, ValueError):
        return False
    return True


class _TarStream:
    """A tar's bytes for `tarfile`, which would read a header of any length into memory."""

    def __init__(self, file: gzip.GzipFile | io.BytesIO) -> None:
        self._file = file
        self.in_content = False

    def read(self, size: int) -> bytes:
        if size > HEADER_MAX_BYTES and not self.in_content:
            raise tarfile.ReadError(f"a header of {size:,} bytes; {HEADER_MAX_BYTES:,} are allowed")
        return self._file.read(size)

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()


def _unpack_members(tar: tarfile.TarFile, file: _TarStream, folder: Path) -> None:
    total_bytes = 0
    for number, member in enumerate(tar):
        tar.members.clear()  # type: ignore[attr-defined] # it would keep them all, with their headers
        if number >= MEMBERS_MAX:
            raise TooLarge(f"the bundle has more than {MEMBERS_MAX} files")
        path = folder.joinpath(*_parts(member.name))
        if member.isdir():
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            continue
        if not member.isreg() or member.issparse():
            raise InvalidSpec(
                f"bundle member {member.name[:200]!r} is neither file nor folder: links and devices are refused"
            )
        total_bytes += member.size
        if total_bytes > UNPACKED_MAX_BYTES:
            raise TooLarge(f"the bundle unpacks to more than {UNPACKED_MAX_BYTES:,} bytes")
        content = tar.extractfile(member)
        assert content is not None
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        file.in_content = True
        _write(content, path, executable=bool(member.mode & 0o100))
        file.in_content = False


def _parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\0" in name
        or len(name.encode("utf-8", "surrogateescape")) > PATH_MAX_BYTES
    ):
        raise InvalidSpec(f"bundle member {name[:200]!r} has a path that is not allowed")
    return path.parts


def _write(content: IO[bytes], path: Path, *, executable: bool) -> None:
    with path.open("xb") as file:
        shutil.copyfileobj(content, file, MIB)
    path.chmod(0o755 if executable else 0o644)
