"""The layers, or the versions of volumes, on the node's disk.

Each is fetched once, shared by all workers that use it, kept while there is room. A layer is a folder named by its id,
with the manifest and `files/`, which workers see read-only. It appears by one rename when all its bytes are verified,
or not at all. Before another one is fetched, layers that no worker uses leave as the policy for weights decides
(`segments.eviction`). A version of a volume is kept in the same way, in another folder; one that a worker commits comes
about here (`stage`, `adopt`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fleetstart.runtime.contract.errors import FleetError, InvalidSpec, LayerInvalid, StartFailed, Unavailable
from fleetstart.runtime.contract.function.layer import (
    MANIFEST_MAX_BYTES,
    MANIFEST_OBJECT,
    LayerManifest,
    own_platform,
    own_python,
    read_layer,
)
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, LayerId, WorkerId
from fleetstart.runtime.contract.object_keys import is_digest

from ..concurrency.threads import in_thread
from ..fetch.bandwidth import Bandwidths
from ..fetch.errors import with_retries
from ..segments.eviction import EvictionCandidate, choose_evictions
from ..sources.base import Source
from ..sources.errors import ObjectMissing
from .boot_check import check_after_boot, mark_whole
from .cache_room import ComingTree, free_bytes
from .download import download
from .imports import learn_imports, read_imports
from .kinds import LAYER, TreeKind

log = logging.getLogger(__name__)

FILES = "files"
HELD_MOST = 256
"""Layers that a report names: each takes 67 bytes of it, every second."""
THREADS = 6
"""Reads at a time, in as many pieces of memory: enough for the round trips of a store; one thread writes."""
_TEMPORARY = ".new-"


@dataclass(slots=True)
class _CachedLayer:
    """A layer on the disk."""

    size_bytes: int
    uses: int = 0
    pins: set[WorkerId] = field(default_factory=set)
    last_used_s: float = 0.0
    """Unix time; also the time of its manifest's file, for the next daemon."""


class LayerCache:
    """The layers of one node. Called from the event loop; fetches run in threads of their own."""

    def __init__(
        self,
        *,
        folder: Path,
        source: Source,
        budget_bytes: int,
        kind: TreeKind = LAYER,
        give_up: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`give_up` releases what is only kept ahead of calls, where a layer has no room otherwise; `changed` is called
        when a layer came."""
        self.bandwidths = Bandwidths()
        self._kind = kind
        self._folder = folder
        self._give_up = give_up
        self._changed = changed
        self._source = source
        self._budget_bytes = budget_bytes
        self._layers: dict[LayerId, _CachedLayer] = {}
        self._under_way: dict[LayerId, asyncio.Task[None]] = {}
        self._coming: dict[Path, ComingTree] = {}
        """Folders in which a layer, or a new version of a volume, comes about."""
        self._evicting = asyncio.Lock()
        """Held until what leaves has left the disk, whose free space would be taken for too little."""
        self._waiting: defaultdict[LayerId, set[WorkerId]] = defaultdict(set)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            self._load(path)

    @property
    def used_bytes(self) -> int:
        """Bytes of the layers, and of those that come about."""
        coming_bytes = sum(tree.size_bytes for tree in self._coming.values())
        return coming_bytes + sum(layer.size_bytes for layer in self._layers.values())

    def has(self, layer: LayerId) -> bool:
        return layer in self._layers

    async def acquire(self, layer: LayerId, worker: WorkerId) -> str:
        """The folder of a layer's packages, which stays until the worker releases it; concurrent callers share a fetch.

        Errors: InvalidSpec, LayerInvalid, ChecksumMismatch, StoreFailed, StartFailed (another Python), Unavailable (no
        room), OSError.
        """
        if not is_digest(layer):
            raise InvalidSpec(f"{layer!r} is not the id of a {self._kind.name}")
        if layer not in self._layers:
            self._waiting[layer].add(worker)
            try:
                await asyncio.shield(self._fetch_once(layer))
            finally:
                self._waiting[layer].discard(worker)
        known = self._layers[layer]
        known.pins.add(worker)
        known.uses += 1
        self._touch(layer)
        return str(self._folder / layer / FILES)

    def release(self, layer: LayerId, worker: WorkerId) -> None:
        if (known := self._layers.get(layer)) is not None:
            known.pins.discard(worker)
            self._touch(layer)

    def held(self) -> list[LayerId]:
        """The layers on the disk, those that were used last first."""
        return sorted(self._layers, key=lambda layer: -self._layers[layer].last_used_s)[:HELD_MOST]

    def imports(self, layer: LayerId, function: FunctionName) -> list[str]:
        """Modules of the layer that the function was seen to import; none if the layer is not here."""
        return read_imports(self._folder / layer).get(function, []) if layer in self._layers else []

    def learn_imports(self, layer: LayerId, function: FunctionName, modules: list[str]) -> None:
        """Keeps, beside the layer, which of its modules a function imports."""
        if layer in self._layers:
            learn_imports(self._folder / layer, function, modules)

    # ── trees that come about on this node ─────────────────────────────────────────────────────────

    async def stage(self, size_bytes: int) -> Path:
        """A new folder for files of so many bytes; the caller ends it with `unstage`. Errors: Unavailable, OSError."""
        staging = await self._reserve(size_bytes, "the new version")
        try:
            self.files_of(staging).mkdir(parents=True, mode=0o755)
        except OSError:
            del self._coming[staging]
            raise
        return staging

    def files_of(self, staging: Path) -> Path:
        return staging / FILES

    def received(self, staging: Path) -> None:
        """Notes that all staged files are written, and so are no longer among the disk's free bytes."""
        coming = self._coming[staging]
        coming.written_bytes = coming.size_bytes

    async def adopt(
        self, staging: Path, layer: LayerId, manifest: LayerManifest, data: bytes, worker: WorkerId
    ) -> None:
        """Keeps staged files under their id, for a worker to use. What cannot be kept is fetched when it is needed."""
        if layer in self._layers:
            self._layers[layer].pins.add(worker)
            return
        try:
            (staging / MANIFEST_OBJECT).write_bytes(data)
            mark_whole(staging)
            staging.rename(self._folder / layer)
        except OSError as error:
            log.warning(f"a new {self._kind.name} is not kept", extra={"layer": layer, "error": str(error)})
            return
        del self._coming[staging]
        self._layers[layer] = _CachedLayer(manifest.total_bytes, uses=1, pins={worker}, last_used_s=time.time())

    async def unstage(self, staging: Path) -> None:
        """Removes a staged folder, unless it was adopted."""
        if staging not in self._coming:
            return
        try:
            await in_thread(lambda: shutil.rmtree(staging, ignore_errors=True), f"{self._kind.name}-unstage")
        finally:
            del self._coming[staging]

    def manifest(self, layer: LayerId) -> LayerManifest:
        """The manifest of one that is on the disk. Errors: LayerInvalid, OSError."""
        return read_layer((self._folder / layer / MANIFEST_OBJECT).read_bytes(), layer)

    # ── fetching ───────────────────────────────────────────────────────────────────────────────────

    def _fetch_once(self, layer: LayerId) -> asyncio.Task[None]:
        task = self._under_way.get(layer)
        if task is None:
            task = self._under_way[layer] = asyncio.create_task(self._fetch(layer))
            task.add_done_callback(lambda done: self._fetched(layer, done))
        return task

    def _fetched(self, layer: LayerId, task: asyncio.Task[None]) -> None:
        self._under_way.pop(layer, None)
        if not task.cancelled():
            task.exception()  # nobody may be left who waits for it

    async def _fetch(self, layer: LayerId) -> None:
        began_s = time.monotonic()
        name = f"{self._kind.name}-{layer[:8]}"
        data = await in_thread(lambda: self._read_manifest(layer), name)
        manifest = read_layer(data, layer)
        _require_own_python(layer, manifest)
        temporary = await self._reserve(manifest.total_bytes, f"{self._kind.name} {layer[:12]}")
        written_s = time.monotonic()
        try:
            await in_thread(lambda: self._write(layer, manifest, data, temporary), name)
            self._layers[layer] = _CachedLayer(manifest.total_bytes, last_used_s=time.time())
        except (OSError, FleetError):
            if layer not in self._layers:
                raise
            return  # it was adopted meanwhile, and is in the place of this one
        finally:
            del self._coming[temporary]
        self.bandwidths.note("layers", manifest.total_bytes, time.monotonic() - written_s)
        self._changed()
        extra = {"layer": layer, "size_bytes": manifest.total_bytes, "took_s": round(time.monotonic() - began_s, 3)}
        log.info(f"{self._kind.name} fetched", extra=extra)

    def _read_manifest(self, layer: LayerId) -> bytes:
        key = self._kind.key(layer, MANIFEST_OBJECT)
        try:
            return with_retries(
                lambda: self._source.read_object(key, MANIFEST_MAX_BYTES), f"{self._kind.name} {layer[:12]}"
            )
        except ObjectMissing as error:
            raise LayerInvalid(
                f"{self._kind.name} {layer[:12]} is not in the store", hint=self._kind.send_again
            ) from error
        except ValueError as error:
            raise LayerInvalid(str(error)) from error

    def _write(self, layer: LayerId, manifest: LayerManifest, data: bytes, temporary: Path) -> None:
        coming = self._coming[temporary]

        def wrote(size_bytes: int) -> None:
            coming.written_bytes += size_bytes

        try:
            (temporary / FILES).mkdir(parents=True, mode=0o755)
            download(self._source, self._kind, layer, manifest, temporary / FILES, THREADS, wrote)
            (temporary / MANIFEST_OBJECT).write_bytes(data)
            mark_whole(temporary)
            temporary.rename(self._folder / layer)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    # ── room ───────────────────────────────────────────────────────────────────────────────────────

    async def _reserve(self, size_bytes: int, what: str) -> Path:
        """A folder for a tree of so many bytes, which is not there yet. They count until the caller takes the folder
        out of `_coming`. What leaves for it is removed before. Errors: Unavailable."""
        async with self._evicting:
            # One turn of the loop: nobody takes a layer between its choice and its end, or the room that it leaves.
            left = [self._forget(layer) for layer in self._choose(size_bytes, what)]
            folder = self._temporary()
            self._coming[folder] = ComingTree(size_bytes)
            try:
                if left:  # thousands of files
                    await in_thread(lambda: _remove(left), f"{self._kind.name}-evict")
            except BaseException:
                del self._coming[folder]
                raise
        return folder

    def _choose(self, needed_bytes: int, what: str) -> list[LayerId]:
        """The layers to evict for so many bytes. Errors: Unavailable."""
        room_bytes = free_bytes(
            budget_bytes=self._budget_bytes,
            used_bytes=self.used_bytes,
            disk_free_bytes=shutil.disk_usage(self._folder).free,
            coming=self._coming.values(),
        )
        chosen = choose_evictions(needed_bytes, room_bytes, self._candidates(), time.time())
        if chosen is None:
            self._give_up()
            chosen = choose_evictions(needed_bytes, room_bytes, self._candidates(), time.time())
        if chosen is None:
            raise Unavailable(
                f"{what} has {needed_bytes:,} bytes, and this node has "
                f"{max(0, room_bytes):,} for {self._kind.name}s beside those in use",
                hint=f"raise {self._kind.setting} on the node, free its disk, or {self._kind.smaller}",
                retry_after_s=1,
            )
        return [LayerId(layer) for layer in chosen]

    def _forget(self, layer: LayerId) -> Path:
        """Takes a layer out of the cache; returns the folder that is left to remove."""
        known, left = self._layers.pop(layer), self._temporary()
        try:
            (self._folder / layer).rename(left)
        except OSError as error:  # somebody has removed it
            log.warning(f"cannot remove a {self._kind.name}", extra={"layer": layer, "error": str(error)})
        log.info(f"{self._kind.name} evicted", extra={"layer": layer, "size_bytes": known.size_bytes})
        return left

    def _temporary(self) -> Path:
        return self._folder / f"{_TEMPORARY}{secrets.token_hex(8)}"

    def _candidates(self) -> list[EvictionCandidate]:
        return [
            EvictionCandidate(
                checkpoint=CheckpointId(layer),
                size_bytes=known.size_bytes,
                fetch_s=known.size_bytes / 1e9,  # all came over the same network
                uses=known.uses,
                last_used_s=known.last_used_s,
                pinned=bool(known.pins) or bool(self._waiting.get(layer)),
            )
            for layer, known in self._layers.items()
        ]

    def _touch(self, layer: LayerId) -> None:
        self._layers[layer].last_used_s = time.time()
        try:
            os.utime(self._folder / layer / MANIFEST_OBJECT)
        except OSError as error:
            log.warning(f"cannot mark a {self._kind.name} as used", extra={"layer": layer, "error": str(error)})

    def _load(self, path: Path) -> None:
        """Takes over a layer of an earlier daemon; removes anything else."""
        try:
            layer = LayerId(path.name)
            manifest = read_layer((path / MANIFEST_OBJECT).read_bytes(), layer)
            check_after_boot(path, path / FILES, ((file.path, file.size_bytes) for file in manifest.files))
            used_s = (path / MANIFEST_OBJECT).stat().st_mtime
            self._layers[layer] = _CachedLayer(manifest.total_bytes, uses=1, last_used_s=used_s)
        except (OSError, LayerInvalid):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _require_own_python(layer: LayerId, manifest: LayerManifest) -> None:
    if manifest.python and (manifest.python, manifest.platform) != (own_python(), own_platform()):
        raise StartFailed(
            f"layer {layer[:12]} was built for {manifest.python} on {manifest.platform}, and this node runs "
            f"{own_python()} on {own_platform()}",
            hint="deploy from an environment with the Python and the platform of the nodes",
        )
