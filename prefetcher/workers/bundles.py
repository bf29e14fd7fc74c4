"""The cache of users' code on the node: each bundle is fetched once, checked against its digest and unpacked.

A bundle appears by one rename, or not at all (`layers.bundle_unpacking`), and after a boot of the machine the sizes of
its files are checked. Bundles that no worker uses are evicted by size and age (`layers.bundle_eviction`); a folder's
time of change is when it was last used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from pathlib import Path

from fleetstart.runtime.contract.errors import ChecksumMismatch, InvalidSpec, NotFound, TooLarge
from fleetstart.runtime.contract.ids import BundleId
from fleetstart.runtime.contract.object_keys import bundle_key, is_digest
from fleetstart.runtime.contract.sizes import MIB

from ..concurrency.threads import in_thread
from ..fetch.errors import with_retries
from ..layers.bundle_eviction import LIMIT_BYTES, UnpackedBundle, bundles_to_evict
from ..layers.bundle_unpacking import FILES, TEMPORARY, is_whole, unpack
from ..sources.base import Source
from ..sources.errors import ObjectMissing

log = logging.getLogger(__name__)

BUNDLE_MAX_BYTES = 256 * MIB
"""Limit of a packed bundle. Code only: weights are loaded from checkpoints."""
EVICT_S = 60.0
_LAYOUT = ".v2"
"""Ending of a bundle's folder. Releases before took one with the bare digest for the files themselves: after going back
to one it fetches them again."""


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
            if not (_bundle_in(path) and is_whole(path)):
                shutil.rmtree(path, ignore_errors=True)

    def ready(self, bundle: BundleId) -> Path | None:
        """The unpacked folder, or None if the bundle is not cached. Does not await: for the fast path of a start."""
        path = self._path(bundle)
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
            left[bundle] = self._folder / f"{TEMPORARY}{secrets.token_hex(8)}"
            with contextlib.suppress(OSError):
                self._path(bundle).rename(left[bundle])
        if left:
            await in_thread(lambda: _remove(left.values()), "bundle-evict")
        for bundle in left:
            log.info("bundle evicted", extra={"bundle": bundle[:12]})

    def _look(self) -> list[UnpackedBundle]:
        """The unpacked bundles, with sizes that are counted once. Blocks."""
        found = []
        for path in self._folder.iterdir():
            if (bundle := _bundle_in(path)) is None:
                continue
            with contextlib.suppress(OSError):
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
        return unpack(data, self._path(bundle))

    def _path(self, bundle: BundleId) -> Path:
        return self._folder / f"{bundle}{_LAYOUT}"


def _bundle_in(path: Path) -> BundleId | None:
    """The bundle of a folder of the cache; None for one of anything else."""
    digest = path.name.removesuffix(_LAYOUT)
    return BundleId(digest) if digest != path.name and is_digest(digest) else None


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
