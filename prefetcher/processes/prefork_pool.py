"""The prefork pool: forks worker processes ahead of orders, hands them out and replaces them, as `prefork_policy`
decides.

All workers are forked here, so that each is in its control group from the start. A pool with a library beside its
profile ("torch:transformers") has a fork server that is launched after its first start, which the profile's own pool
serves, and ends when it was not needed for a while or its memory is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from fleetstart.runtime.contract.errors import FleetError, Unavailable
from fleetstart.runtime.contract.ids import FunctionName, WorkerId, new_worker_id
from fleetstart.runtime.contract.node.messages import Pooled

from .control_groups.groups import Cgroup, Cgroups
from .forked_process import ChannelEnded, ForkedProcess, ProcessEvent, ProcessExited, has_own_user
from .forkserver_client import ForkServer
from .prefork_policy import SETTLE_S, PoolState, choose_pool, is_preloaded, is_unsandboxed
from .worker_uids import WorkerUids

log = logging.getLogger(__name__)

SPARE_TIMEOUT_S = 30.0
"""Limit from fork to `Pooled`: usually under a second, but a sandbox imports torch by itself."""
REMOVE_TIMEOUT_S = 5.0
"""Limit for a control group to become empty after its worker's end."""
IDLE_S = 900.0
"""Time without a fork after which a fork server with a library of its own ends: it holds some hundred megabytes."""
TICK_S = 0.5
"""Polling interval without events: pauses after failures end without one."""


class PreforkPool:
    """Waiting processes of each worker pool."""

    def __init__(
        self,
        *,
        servers: dict[str, ForkServer],
        cgroups: Cgroups | None,
        size: int,
        starts_under_way: Callable[[], int],
        uids: WorkerUids,
    ) -> None:
        self._servers = servers
        self._cgroups = cgroups
        self._uids = uids
        self._size = size
        self._starts_under_way = starts_under_way
        self._waiting: dict[str, list[ForkedProcess]] = {pool: [] for pool in servers}
        self._forking: dict[str, int] = dict.fromkeys(servers, 0)
        self._failures: dict[str, tuple[int, float]] = dict.fromkeys(servers, (0, 0.0))
        self._requested: set[str] = set()
        self._wanted: set[str] = set()
        """Pools whose fork servers are to be launched when no start is under way."""
        self._last_start_s = 0.0
        self._had_starts = False
        self._woken = asyncio.Event()
        self._removing: set[asyncio.Task[None]] = set()

    def has(self, pool: str) -> bool:
        return bool(self._waiting.get(self._serving(pool)))

    def wake(self) -> None:
        """Re-evaluates the pools: a start began or ended, or a fork server changed."""
        self._woken.set()

    def waiting(self) -> list[ForkedProcess]:
        return [process for processes in self._waiting.values() for process in processes]

    def take(self, pool: str) -> ForkedProcess | None:
        waiting = self._waiting.get(self._serving(pool))
        return waiting.pop(0) if waiting else None

    def give_user(self, process: ForkedProcess, function: FunctionName) -> int:
        """The user id that a process takes for a function, its own until it is closed; 0 if workers of its kind keep
        the daemon's. Errors: Unavailable if no id is left."""
        if not process.user and has_own_user(process.isolation):
            process.hold_user(self._uids.take(function), lambda: self._uids.give_back(function))
        return process.user

    async def fork(
        self,
        pool: str,
        *,
        network: bool,
        folders: Mapping[str, str] | None = None,
        image: str = "",
        gpus: Sequence[str] = (),
    ) -> ForkedProcess:
        """Forks a fresh worker; `folders` are for sandboxes, which get none later: source by path. `image` and `gpus`
        are for containers.

        Errors: Unavailable or StartFailed, with the reason.
        """
        pool = self._serving(pool)
        server = self._servers.get(pool)
        if server is None:
            raise Unavailable(
                f"this node starts no workers of {pool}; it has {', '.join(self._servers) or 'none'}",
                hint="install what these workers need on the node (torch; for gvisor, runsc and control groups; for "
                "containers, an engine that FS_CONTAINER_ENGINE names)",
            )
        self._requested.add(pool)
        worker = new_worker_id()
        group = self._create_group(worker)
        try:
            return await server.fork(worker, group, pool=pool, network=network, folders=folders, image=image, gpus=gpus)
        except BaseException:
            self.remove_group(group)
            raise

    async def is_current(self, process: ForkedProcess) -> bool:
        """True if the image of a process' container is still the one that its name means; False also if nobody can
        tell."""
        return await self._servers[process.pool].is_current(process.fork_id)

    def _serving(self, pool: str) -> str:
        """The pool that serves this one: itself, or its profile's until its fork server has imported the library."""
        profile, _, preload = pool.partition(":")
        if not preload or pool not in self._servers:
            return profile
        self._wanted.add(pool)
        return pool if self._servers[pool].warm is not None else profile

    @property
    def preloaded_bytes(self) -> int:
        """Memory of the fork servers that hold a library beside their profile's."""
        return sum(server.own_bytes for server in self._preloaded())  # other threads ask, too: nothing is changed

    def reclaim(self, needed_bytes: int) -> int:
        """Ends such fork servers, if no worker of theirs lives, until so many bytes are free; returns how many are."""
        freed_bytes = 0
        for server in sorted(self._preloaded(), key=lambda server: server.last_fork_s):
            if freed_bytes < needed_bytes and not self._in_use(server):
                freed_bytes += server.own_bytes
                self._rest(server)
        return freed_bytes

    def _end_idle(self, now_s: float) -> None:
        for server in self._preloaded():
            if now_s - server.last_fork_s > IDLE_S and not self._in_use(server):
                self._rest(server)

    def _preloaded(self) -> list[ForkServer]:
        return [server for pool, server in self._servers.items() if is_preloaded(pool) and server.warm is not None]

    def _in_use(self, server: ForkServer) -> bool:
        """Checks whether workers of the fork server are with functions; those that wait end with it."""
        return server.workers > len(self._waiting[self._pool_of(server)])

    def _rest(self, server: ForkServer) -> None:
        pool = self._pool_of(server)
        self._wanted.discard(pool)
        for process in self._waiting[pool]:
            self._discard(process)
        self._waiting[pool] = []
        log.info("a fork server that was not needed is ended", extra={"pool": pool, "size_bytes": server.own_bytes})
        server.rest()

    def _pool_of(self, server: ForkServer) -> str:
        return next(pool for pool, own in self._servers.items() if own is server)

    def remove_group(self, group: Cgroup | None) -> None:
        """Removes a control group, now or once its last process is gone."""
        if group is None or group.remove():
            return
        task = asyncio.create_task(_remove(group))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def run(self) -> None:
        """Keeps the pools filled until cancelled."""
        while True:
            starts = self._starts_under_way()
            if starts or self._had_starts:
                # Also the first look after they ended, since the exact time is unknown.
                self._last_start_s = time.monotonic()
            self._had_starts = starts > 0
            self._end_idle(time.monotonic())
            if not starts and not self._is_settling():
                while self._wanted:
                    self._servers[self._wanted.pop()].want()
            pool = choose_pool(
                self._pools(),
                size=self._size,
                starts_under_way=starts,
                last_start_s=self._last_start_s,
                now_s=time.monotonic(),
            )
            if pool is not None:
                await self._fork_spare(pool)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S + 0.01 if starts or self._is_settling() else TICK_S):
                    await self._woken.wait()
            self._woken.clear()

    @property
    def is_quiet(self) -> bool:
        """Checks whether no start is under way, nor was just before: what is made ahead then delays none."""
        return not self._starts_under_way() and not self._is_settling()

    def _is_settling(self) -> bool:
        return time.monotonic() - self._last_start_s < SETTLE_S

    async def close(self) -> None:
        """Kills the waiting processes while their fork servers still run to reap them."""
        ends = [asyncio.create_task(process.exited.wait()) for process in self.waiting()]
        for process in self.waiting():
            process.kill()
        if ends:
            await asyncio.wait(ends, timeout=REMOVE_TIMEOUT_S / 2)
        for task in list(self._removing):
            await task

    def _pools(self) -> dict[str, PoolState]:
        return {
            pool: PoolState(
                warm=server.warm is not None and (is_unsandboxed(pool) or pool in self._requested),
                waiting=len(self._waiting[pool]),
                forking=self._forking[pool],
                failures=self._failures[pool][0],
                failed_at_s=self._failures[pool][1],
            )
            for pool, server in self._servers.items()
        }

    async def _fork_spare(self, pool: str) -> None:
        process: ForkedProcess | None = None
        self._forking[pool] += 1
        try:
            async with asyncio.timeout(SPARE_TIMEOUT_S):
                process = await self.fork(pool, network=False)
                pooled = await self._pooled(process)
        except (OSError, FleetError) as error:  # a timeout too; no lack of anything may end the daemon and its workers
            log.warning("preforking failed", extra={"pool": pool, "error": str(error)})
            pooled = False
        except asyncio.CancelledError:
            if process is not None:
                self._discard(process)
            raise
        finally:
            self._forking[pool] -= 1
        if process is not None and pooled:
            self._failures[pool] = (0, 0.0)
            self._waiting[pool].append(process)
            process.listen(lambda event: self._on_waiting_event(process, event))
            log.info("worker preforked", extra={"pool": pool, "pid": process.pid})
            return
        self._failures[pool] = (self._failures[pool][0] + 1, time.monotonic())
        if process is not None:
            self._discard(process)

    async def _pooled(self, process: ForkedProcess) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def on_event(event: ProcessEvent) -> None:
            if not answer.done():
                answer.set_result(isinstance(event, Pooled))

        process.listen(on_event)
        return await answer

    def _on_waiting_event(self, process: ForkedProcess, event: ProcessEvent) -> None:
        """Drops a waiting process that has ended."""
        if isinstance(event, ChannelEnded | ProcessExited) and process in self._waiting[process.pool]:
            self._waiting[process.pool].remove(process)
            failures, _ = self._failures[process.pool]
            self._failures[process.pool] = (failures + 1, time.monotonic())
            self._discard(process)

    def _discard(self, process: ForkedProcess) -> None:
        process.kill()
        process.close()
        self.remove_group(process.group)

    def _create_group(self, worker: WorkerId) -> Cgroup | None:
        if self._cgroups is None:
            return None
        try:
            return self._cgroups.create(worker)
        except OSError as error:
            log.warning(
                "no control group for a worker: its memory limit is enforced by polling", extra={"error": str(error)}
            )
            return None


async def _remove(group: Cgroup) -> None:
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while not group.remove():
        if time.monotonic() > deadline:
            log.warning("cannot remove a control group: processes are left in it", extra={"group": group.procs})
            return
        await asyncio.sleep(0.02)
