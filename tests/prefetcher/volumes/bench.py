"""A node's end of volumes and its workers' ends: the handler's API, the node's cache and store, and Redis."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from fleetstart.prefetcher.control.redis_state import NodeState, connect
from fleetstart.prefetcher.control.volume_records import VolumeRecords
from fleetstart.prefetcher.layers.cache import LayerCache
from fleetstart.prefetcher.layers.kinds import VOLUME
from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.volumes.session import VolumeNode, VolumeSession
from fleetstart.prefetcher.volumes.store_writer import StoreWriter
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.function.volume import MountedVolume, VolumeRecord
from fleetstart.runtime.contract.ids import LayerId, NodeId, WorkerId
from fleetstart.runtime.sdk import volumes as sdk
from fleetstart.runtime.sdk.volumes import Volume, volume
from tests.servers import RedisServer

ONE, TWO = WorkerId("w-1"), WorkerId("w-2")


class Bench:
    """One node with its cache and state, and a volume `index` in Redis."""

    def __init__(
        self,
        source: Source,
        writer: StoreWriter,
        redis_server: RedisServer,
        folder: Path,
        budget_bytes: int = 1 << 30,
    ) -> None:
        self.state = NodeState(connect(redis_server.url), NodeId("node-1"))
        self.client = redis_server.client()
        self.folder = folder / "volumes"
        self.cache = LayerCache(folder=self.folder, source=source, budget_bytes=budget_bytes, kind=VOLUME)
        records = VolumeRecords(self.state)
        self.node = VolumeNode(cache=self.cache, writer=writer, publish=records.publish, find=records.find)
        record = VolumeRecord(name="index", project="default", created_unix_ms=1, created_by="local")
        self.client.delete(keys.VOLUMES)
        self.client.hset(keys.VOLUMES, record.full_name, msgspec.json.encode(record))

    @property
    def record(self) -> VolumeRecord:
        data = self.client.hget(keys.VOLUMES, "index")
        assert data is not None
        return msgspec.json.decode(data, type=VolumeRecord)

    @asynccontextmanager
    async def stream(
        self, worker: WorkerId = ONE, *, beside: Sequence[MountedVolume] = ()
    ) -> AsyncIterator[socket.socket]:
        """The worker's end of a session, for a worker that starts now; `beside`: what else it has mounted."""
        newest = self.record.latest
        mounted = MountedVolume(
            name="index",
            number=newest.number if newest else 0,
            tree=newest.tree if newest else LayerId(""),
            write=True,
        )
        if newest is not None:
            mounted = msgspec.structs.replace(mounted, folder=await self.cache.acquire(newest.tree, worker))
        session = VolumeSession(self.node, worker, "writes", "default", [mounted, *beside], memory_bytes=4 << 30)
        sock = socket.socket(fileno=os.dup(session.descriptor()))
        session.begin()
        sdk.provide_volumes([(mounted, mounted.folder)], sock)
        try:
            yield sock
        finally:
            sock.close()
            session.close()

    @asynccontextmanager
    async def worker(self, worker: WorkerId = ONE, *, beside: Sequence[MountedVolume] = ()) -> AsyncIterator[Volume]:
        async with self.stream(worker, beside=beside):
            yield volume("index")

    async def evict_for(self, size_bytes: int) -> None:
        """Has the cache make room for so many bytes. Errors: Unavailable."""
        await self.cache.unstage(await self.cache.stage(size_bytes))

    def staged(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name.startswith(".new-")]


def run(bench: Bench, scenario: Callable[[], Coroutine[object, object, None]]) -> None:
    async def whole() -> None:
        try:
            await scenario()
        finally:
            await bench.state.close()

    asyncio.run(whole())


def write(one: Volume, files: dict[str, bytes | None]) -> int:
    """Commits a change of files; None removes one."""
    with one.writable() as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(content)
        return one.commit()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
