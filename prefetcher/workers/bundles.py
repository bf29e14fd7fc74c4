"""The cache of users' code on the node: each bundle is fetched once, checked against its digest and unpacked.

A bundle is untrusted: a tar, plain or gzipped, of files and folders. Anything else in it (links, devices, paths that
leave the folder) is rejected, and nothing of it is kept: a bundle appears under its digest by one rename, or not at
all, and after a boot of the machine the sizes of its files are checked. Bundles that no worker uses are evicted by size
and age (`layers.bundle_eviction`); a folder's time of change is when it was last used.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO

from fleetstart.runtime.contract.errors import ChecksumMismatch, InvalidSpec, LayerInvalid, NotFound, TooLarge
from fleetstart.runtime.contract.ids import BundleId
from fleetstart.runtime.contract.object_keys import bundle_key, is_digest
from fleetstart.runtime.contract.sizes import MIB

from ..concurrency.threads import in_thread
from ..fetch.errors import with_retries
from ..layers.boot_check import check_after_boot, mark_whole
from ..layers.bundle_eviction import LIMIT_BYTES, UnpackedBundle, bundles_to_evict
from ..sources.base import Source
from ..sources.errors import ObjectMissing

log = logging.getLogger(__name__)

BUNDLE_MAX_BYTES = 256 * MIB
"""Limit of a packed bundle. Code only: weights are loaded from checkpoints."""
UNPACKED_MAX_BYTES = 1024 * MIB
MEMBERS_MAX = 20_000
PATH_MAX_BYTES = 1024
HEADER_MAX_BYTES = 16 * 1024
"""Longest header of a member. Long names and PAX attributes are headers, which `tarfile` reads whole."""
EVICT_S = 60.0
FILES = "files"
SIZES = "sizes.json"
"""Bytes of each file, for the check after a boot."""
_TEMPORARY = ".new-"


class BundleCache:
    """Unpacked bundles by digest, in a folder of the node."""

    def __init__(
        self,
        *,
        folder: Path,
        source: Source,
        in_use: Callable[[], Set[BundleId]] = frozenset,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """`in_use`: bundles of workers that there are, or that are starting."""
        self._folder = folder
        self._in_use = in_use
        self._limit_bytes = limit_bytes
        self._sizes: dict[BundleId, int] = {}
        self._source = source
        self._under_way: dict[BundleId, asyncio.Task[Path]] = {}
        self._unpacked: set[BundleId] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not _is_whole(path):
                shutil.rmtree(path, ignore_errors=True)

    def ready(self, bundle: BundleId) -> Path | None:
        """The unpacked folder, or None if the bundle is not cached. Does not await: for the fast path of a start."""
        path = self._folder / bundle
        if bundle not in self._unpacked and not (is_digest(bundle) and (path / FILES).is_dir()):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        self._unpacked.add(bundle)
        return path / FILES

    async def get(self, bundle: BundleId) -> Path:
        """The unpacked folder; concurrent callers share one fetch.

        Errors: InvalidSpec, NotFound, ChecksumMismatch, TooLarge, StoreFailed.
        """
        if (path := self.ready(bundle)) is not None:
            return path
        if not is_digest(bundle):
            raise InvalidSpec(f"{bundle!r} is not the id of a bundle")
        task = self._under_way.get(bundle)
        if task is None:
            task = asyncio.create_task(in_thread(lambda: self._fetch(bundle), f"bundle-{bundle[:8]}"))
            self._under_way[bundle] = task
            task.add_done_callback(lambda _: self._under_way.pop(bundle, None))
        return await asyncio.shield(task)

    async def run(self) -> None:
        """Evicts again and again."""
        while True:
            await self.evict(time.time())
            await asyncio.sleep(EVICT_S)

    async def evict(self, now_unix_s: float) -> None:
        """Deletes the bundles that leave the disk."""
        there = await in_thread(self._look, "bundle-sizes")
        in_use = self._in_use() | self._under_way.keys()
        there = [replace(one, in_use=one.bundle in in_use) for one in there]
        left = {}
        for bundle in bundles_to_evict(there, now_unix_s, self._limit_bytes):
            # In this turn of the loop nobody uses any of them, and from now on nobody finds one.
            self._unpacked.discard(bundle)
            self._sizes.pop(bundle, None)
            left[bundle] = self._folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
            with contextlib.suppress(OSError):
                (self._folder / bundle).rename(left[bundle])
        if left:
            await in_thread(lambda: _remove(left.values()), "bundle-evict")
        for bundle in left:
            log.info("bundle evicted", extra={"bundle": bundle[:12]})

    def _look(self) -> list[UnpackedBundle]:
        """The unpacked bundles, with sizes that are counted once. Blocks."""
        found = []
        for path in self._folder.iterdir():
            if not is_digest(path.name):
                continue
            with contextlib.suppress(OSError):
                bundle = BundleId(path.name)
                if bundle not in self._sizes:
                    self._sizes[bundle] = sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
                found.append(
                    UnpackedBundle(bundle=bundle, size_bytes=self._sizes[bundle], used_unix_s=path.stat().st_mtime)
                )
        return found

    def _fetch(self, bundle: BundleId) -> Path:
        key = bundle_key(bundle)
        try:
            data = with_retries(lambda: self._source.read_object(key, BUNDLE_MAX_BYTES), f"bundle {bundle[:12]}")
        except ObjectMissing as error:
            raise NotFound(f"bundle {bundle[:12]} is not in the store", hint="deploy the function again") from error
        except ValueError as error:
            raise TooLarge(str(error)) from error
        assert isinstance(data, bytes)
        if (found := hashlib.sha256(data).hexdigest()) != bundle:
            raise ChecksumMismatch(f"bundle {bundle[:12]}: the store's bytes have digest {found[:12]}")
        return unpack(data, self._folder / bundle)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def pack_tar(folder: Path) -> int:
    """A descriptor of an in-memory tar of the folder, for workers in sandboxes, which cannot see the folder itself.

    Blocks. Errors: OSError.
    """
    descriptor = os.memfd_create("bundle", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(folder, arcname=".")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unpack(data: bytes, target: Path) -> Path:
    """Unpacks beside the target, then renames; returns the folder of the files. A target that exists already is left
    as it is."""
    temporary = target.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
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


def _is_whole(path: Path) -> bool:
    """Checks a bundle of an earlier daemon: it was unpacked to its end, and no power loss has cut it since."""
    if not is_digest(path.name):
        return False
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
