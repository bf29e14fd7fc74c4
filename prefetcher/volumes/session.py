"""The node's end of a worker's stream for volumes: commits and reloads, one after the other, for the worker's life.

Nothing that comes from the worker is trusted: which volumes it may write, and on which version a commit is based, is
known here. A commit that is refused, or whose worker ends before it is published, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fleetstart.runtime.contract.errors import FleetError, InvalidInput, NotFound, StoreFailed, TooLarge
from fleetstart.runtime.contract.function.volume import MountedVolume, VolumeRecord, VolumeVersion
from fleetstart.runtime.contract.ids import LayerId, WorkerId
from fleetstart.runtime.contract.node.volume_stream import (
    Commit,
    Done,
    Incoming,
    Reload,
    StreamClosed,
    TransferAborted,
    VolumeStream,
    check_announced,
    discard_files,
    receive_files,
    send_files,
)

from ..concurrency.threads import in_thread
from ..layers.cache import LayerCache
from .store_version import Abandoned, StoredVersion, store_version
from .store_writer import StoreWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VolumeNode:
    """The part of the node that sessions need."""

    cache: LayerCache
    writer: StoreWriter
    publish: Callable[[str, str, int, VolumeVersion], Awaitable[VolumeRecord]]
    """(project, name, base, version): adds the version to the volume's record. Errors: Conflict, NotFound,
    InvalidInput, Unavailable."""
    find: Callable[[str, str], Awaitable[VolumeRecord | None]]
    """(project, name): the volume's record. Errors: Unavailable."""


class VolumeSession:
    """The stream of one worker. `descriptor()` is the worker's end until `begin`."""

    def __init__(
        self,
        node: VolumeNode,
        worker: WorkerId,
        function: str,
        project: str,
        volumes: list[MountedVolume],
        *,
        memory_bytes: int,
    ) -> None:
        """`volumes`: those that the worker has mounted, which are pinned on the node's disk as long as it lives.
        `memory_bytes`: the worker's memory, which holds its copies, so no version of it can be larger."""
        self._memory_bytes = memory_bytes
        self._node = node
        self._worker = worker
        self._function = function
        self._project = project
        self._bases = {one.name: (one.number, one.tree) for one in volumes if one.write}
        """Version that each volume's next commit is based on."""
        self._mounted = frozenset(one.tree for one in volumes)
        self._acquired: set[LayerId] = set()
        """Trees that are pinned for this session alone: what is mounted belongs to the worker."""
        own, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream = VolumeStream(own)
        self._task: asyncio.Task[None] | None = None

    def descriptor(self) -> int:
        return self._its.fileno()

    def begin(self) -> None:
        """Serves the worker, which has its end now."""
        self._its.close()
        self._task = asyncio.create_task(self._serve(), name=f"volumes-{self._worker}")

    def close(self) -> None:
        """Ends the session. A commit that has not been published is dropped."""
        self._its.close()
        self._stream.close()
        if self._task is not None:
            self._task.cancel()
        self._bases = {}
        self._release_former()

    async def _serve(self) -> None:
        try:
            await self._answer_all()
        except StreamClosed:
            pass  # the worker is gone, or this session was closed
        except Exception:
            log.exception("the stream of a worker's volumes failed", extra={"worker": self._worker})
        finally:
            self._stream.close()  # a worker that waits for an answer waits no longer

    async def _answer_all(self) -> None:
        """Answers commits and reloads until something else comes. Errors: StreamClosed, and what nobody expected."""
        while True:
            message = await in_thread(self._stream.receive, f"volumes-{self._worker}")
            if isinstance(message, Commit):
                await self._commit(message)
            elif isinstance(message, Reload):
                await self._answer(self._reload(message))
            else:
                break

    async def _commit(self, commit: Commit) -> None:
        """Answers once. A commit that is refused before its end is answered at once, and the rest of it is dropped."""
        staging: Path | None = None
        received = False
        try:
            base, tree = self._base(commit.volume)
            check_announced(commit.files, commit.size_bytes)
            if commit.size_bytes > self._memory_bytes:
                raise TooLarge(
                    f"{commit.size_bytes:,} bytes, and a version that {self._function} commits has "
                    f"{self._memory_bytes:,} at most, as its worker has memory",
                    hint="raise memory",
                )
            staging = await self._node.cache.stage(commit.size_bytes)
            folder = staging
            await in_thread(
                lambda: receive_files(self._stream, self._node.cache.files_of(folder), commit.files, commit.size_bytes),
                f"volumes-{self._worker}",
            )
            received = True
            self._node.cache.received(staging)
            await self._answer(self._publish(commit.volume, base, tree, folder))
        except TransferAborted:
            await self._send(Done(error=InvalidInput(f"the commit of volume {commit.volume} was given up").info()))
        except (FleetError, OSError) as error:
            await self._send(Done(error=_told(error).info()))
            if not received:
                await in_thread(lambda: discard_files(self._stream), f"volumes-{self._worker}")
        finally:
            if staging is not None:
                await self._node.cache.unstage(staging)

    async def _publish(self, name: str, base: int, base_tree: LayerId, staging: Path) -> int:
        """Stores the files in staging and publishes them as the version after `base`; returns its number."""
        began_s = time.monotonic()
        cache = self._node.cache  # it may not have kept the base, all of whose parts are then stored again
        known = cache.manifest(base_tree) if cache.has(base_tree) else None
        folder = cache.files_of(staging)
        try:
            stored = await in_thread(
                lambda: store_version(self._node.writer, folder, known, lambda: self._gone), f"volumes-{self._worker}"
            )
        except Abandoned as error:
            raise StreamClosed("the worker is gone") from error
        if stored.tree == base_tree:
            return base
        record = await self._node.publish(self._project, name, base, _version(stored, self._function))
        version = next(one for one in reversed(record.versions) if one.tree == stored.tree)
        # Workers that start find the files on the node's disk, and the next commit its base.
        await cache.adopt(staging, stored.tree, stored.manifest, stored.data, self._worker)
        self._acquired |= {stored.tree} - self._mounted
        self._bases[name] = version.number, stored.tree
        self._release_former()
        log.info(
            "volume committed",
            extra={
                "volume": name,
                "version": version.number,
                "worker": self._worker,
                "size_bytes": stored.manifest.total_bytes,
                "new_bytes": stored.new_bytes,
                "took_s": round(time.monotonic() - began_s, 3),
            },
        )
        return version.number

    async def _reload(self, reload: Reload) -> int:
        name = reload.volume
        number, tree = self._base(name)
        if not reload.again:
            record = await self._node.find(self._project, name)
            if record is None:
                raise NotFound(f"volume {name} was removed")
            version = record.latest
            if version is None or version.number == number:
                return number
            number, tree = version.number, version.tree
        folder = Path(await self._node.cache.acquire(tree, self._worker))
        self._acquired |= {tree} - self._mounted
        try:
            manifest = self._node.cache.manifest(tree)
            await self._send(Incoming(len(manifest.files), manifest.total_bytes))
            await in_thread(lambda: send_files(self._stream, folder, manifest.files), f"volumes-{self._worker}")
            self._bases[name] = number, tree
        finally:
            self._release_former()
        return number

    def _release_former(self) -> None:
        """Unpins the versions that no next commit is based on."""
        bases = {tree for _, tree in self._bases.values()}
        for tree in self._acquired - bases:
            self._node.cache.release(tree, self._worker)
        self._acquired &= bases

    def _base(self, name: str) -> tuple[int, LayerId]:
        if name not in self._bases:
            raise InvalidInput(f"volume {name[:80]!r} is not among those that this worker may write")
        return self._bases[name]

    @property
    def _gone(self) -> bool:
        """Checks whether the worker has ended, or broken the protocol: nothing comes from it before the answer."""
        try:
            poll = select.poll()
            poll.register(self._stream.socket.fileno(), select.POLLIN | select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True  # closed here

    async def _answer(self, work: Awaitable[int]) -> None:
        try:
            answer = Done(version=await work)
        except (FleetError, OSError) as error:
            answer = Done(error=_told(error).info())
        await self._send(answer)

    async def _send(self, message: Done | Incoming) -> None:
        await in_thread(lambda: self._stream.send(message), f"volumes-{self._worker}")


def _version(stored: StoredVersion, function: str) -> VolumeVersion:
    manifest = stored.manifest
    return VolumeVersion(
        number=0,
        tree=stored.tree,
        size_bytes=manifest.total_bytes,
        files=len(manifest.files),
        new_bytes=stored.new_bytes,
        created_unix_ms=time.time_ns() // 1_000_000,
        created_by=function,
    )


def _told(error: FleetError | OSError) -> FleetError:
    if isinstance(error, FleetError):
        return error
    return StoreFailed(f"the node could not write the files: {error.strerror or error}")
