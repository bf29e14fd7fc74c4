"""The folders of one worker on its node's disk: its packages, and its volumes with the stream for their commits.

They are pinned from the worker's start until its process has ended.
"""

from __future__ import annotations

import time

import msgspec

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.function.layer import LAYER_DIR
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.function.volume import MountedVolume, Mounts, volume_path
from fleetstart.runtime.contract.ids import LayerId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder

from ..volumes.session import VolumeSession
from .node_services import NodeServices


class WorkerFolders:
    """Packages and volumes of one worker."""

    def __init__(self, services: NodeServices) -> None:
        self._services = services
        self.layer_dir = ""
        """Folder of its packages; empty: it has none."""
        self.volumes: list[MountedVolume] = []
        """Its volumes, each with its folder on this node."""
        self.fetch_ns: tuple[int, int] | None = None
        """(begin, end) of the fetch of what the node did not have."""
        self._layer: LayerId | None = None
        self._session: VolumeSession | None = None

    async def acquire_layer(self, spec: FunctionSpec, worker: WorkerId) -> str:
        """Pins the packages of the function on the node's disk; returns their folder, "" if it has none."""
        if spec.layer is None:
            return ""
        layers, began_ns = self._services.layers, time.monotonic_ns()
        fetched = not layers.has(spec.layer)
        self.layer_dir = await layers.acquire(spec.layer, worker)
        self._layer = spec.layer
        if fetched:
            self.fetch_ns = began_ns, time.monotonic_ns()
        return self.layer_dir

    async def acquire_volumes(self, order: WorkerOrder) -> None:
        """Pins the volumes of the function on the node's disk."""
        mounts = order.mounts or Mounts()
        if mounts.error:
            raise StartFailed(mounts.error)
        began_ns, cache = time.monotonic_ns(), self._services.volumes.cache
        fetched = not all(cache.has(one.tree) for one in mounts.volumes if one.number)
        for one in mounts.volumes:
            folder = await cache.acquire(one.tree, order.worker) if one.number else ""
            self.volumes.append(msgspec.structs.replace(one, folder=folder))
        if fetched:
            begun_ns = min(began_ns, self.fetch_ns[0]) if self.fetch_ns is not None else began_ns
            self.fetch_ns = begun_ns, time.monotonic_ns()

    def inside(self) -> dict[str, str]:
        """Folders of the node that a sandbox sees: by path inside it."""
        layer = {LAYER_DIR: self.layer_dir} if self.layer_dir else {}
        return layer | {volume_path(one): one.folder for one in self.volumes if one.folder}

    def open_session(self, order: WorkerOrder) -> VolumeSession | None:
        """The stream for commits, if there is a volume to write. One that was opened before is closed."""
        self.close_session()
        spec = order.spec
        if any(one.write for one in self.volumes):
            self._session = VolumeSession(
                self._services.volumes,
                order.worker,
                spec.name,
                spec.home,
                self.volumes,
                memory_bytes=spec.memory_bytes,
            )
        return self._session

    def close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def release(self, worker: WorkerId) -> None:
        """Unpins all. Called once the process has ended."""
        if self._layer is not None:
            self._services.layers.release(self._layer, worker)
            self._layer = None
        self.close_session()
        for one in self.volumes:
            if one.folder:
                self._services.volumes.cache.release(one.tree, worker)
        self.volumes = []
