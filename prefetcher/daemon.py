"""The node daemon: joins decisions, workers and Redis, and keeps each going while the others fail.

Redis may go away at any time: workers run on, what is to be written waits, and everything is written
again once it is back. Only SIGTERM or a fault in the daemon itself end it, and its end is the end of
every process and every byte of shared memory that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fleetstart.prefetcher.bundles import Bundles
from fleetstart.prefetcher.cgroups import Groups, epoch_is_alive, new_epoch, open_groups, read_hierarchies
from fleetstart.prefetcher.config import Config
from fleetstart.prefetcher.disk import DiskTier
from fleetstart.prefetcher.forkserver import ForkServer
from fleetstart.prefetcher.logs import Logs
from fleetstart.prefetcher.meter import FLUSH_S, Rows
from fleetstart.prefetcher.outbox import Outbox, attempts
from fleetstart.prefetcher.reconcile import (
    Action,
    Drain,
    Forget,
    Kill,
    Own,
    Refuse,
    Start,
    Tell,
    act_on_order,
    reconcile,
)
from fleetstart.prefetcher.relay import open_relays
from fleetstart.prefetcher.segments import Segments
from fleetstart.prefetcher.sources import Source
from fleetstart.prefetcher.spares import Spares
from fleetstart.prefetcher.speeds import Speeds
from fleetstart.prefetcher.state import LEASE_MS, NodeState, Unreachable
from fleetstart.prefetcher.watched import INTERVAL_S, private_bytes
from fleetstart.prefetcher.workers import Host, Worker
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.messages import NodeReport, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.tasks import end_tasks

log = logging.getLogger(__name__)

RENEW_S = LEASE_MS / 3000
REREAD_S = 1.0
AWAY_S = 0.2
"""Between renewals that fail."""
START_HURRY_S = 10.0
LAST_WRITES_S = 2.0
"""At the end, for the last statuses, lines and rows."""


class NodeTaken(Exception):
    """Another daemon that is alive holds this node's name."""


class Daemon:
    def __init__(self, config: Config, source: Source) -> None:
        self._config = config
        self.epoch = new_epoch(os.urandom(4).hex())
        self._state = NodeState(config.redis_url, config.node)
        self._groups: Groups | None = None if config.watch_only else _open_groups(self.epoch)
        self._lease_changed = asyncio.Event()
        self._reread = asyncio.Event()
        self._statuses: dict[WorkerId, WorkerStatus] = {}
        self._workers: dict[WorkerId, Worker] = {}
        self._seen_ns: dict[WorkerId, int] = {}
        self._rows = Rows()
        self._speeds = Speeds()
        self._logs = Logs()
        self._outbox = Outbox(self._state, self._logs, self._rows)
        self._servers = {
            profile: ForkServer(
                profile=profile, hide=_hidden(config), env=config.worker_env, changed=self._server_changed
            )
            for profile in config.profiles
        }
        self._segments = Segments(
            source=source,
            memory_bytes=config.memory_bytes,
            workers_bytes=self._workers_bytes,
            threads=config.fetch_threads,
            keep_bytes=config.keep_bytes,
            disk=_disk_tier(config),
            changed=self._lease_changed.set,
        )
        self._spares = Spares(
            servers=self._servers,
            groups=self._groups,
            size=config.pool_size,
            starts_under_way=self._starts_under_way,
        )
        self._relays = open_relays(config.store)
        self._host = Host(
            node=config.node,
            address=config.address,
            cpus=config.cpus,
            bundles=Bundles(folder=config.state_dir / "bundles", source=source),
            segments=self._segments,
            spares=self._spares,
            logs=self._logs,
            rows=self._rows,
            speeds=self._speeds,
            relays=self._relays,
            publish=self._publish,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; then ends everything in order. NodeTaken if the node's name is in use."""
        servers = [asyncio.create_task(server.run(), name=f"server-{name}") for name, server in self._servers.items()]
        try:
            await self._take_name(stop)
            loops = [
                self._renew(),
                self._listen(),
                self._read_orders(),
                self._outbox.write_statuses(),
                self._outbox.write_logs(),
                self._outbox.write_rows(),
                self._flush_meters(),
                self._spares.run(),
                self._watch_memory(),
            ]
            tasks = [asyncio.create_task(self._guarded(loop)) for loop in loops]
            try:
                await _first_of(stop, tasks)
                log.info("ending", extra={"workers": len(self._workers)})
                await self._end_workers()
                await self._write_last()
            finally:
                await end_tasks(tasks)
        finally:
            if self._relays is not None:
                await asyncio.to_thread(self._relays.close)
            await self._spares.close()
            await self._segments.close()
            for server in servers:
                server.cancel()  # once: each ends its workers then, which takes a while
            await asyncio.gather(*servers, return_exceptions=True)
            if self._groups is not None:
                self._groups.close()
            await self._state.close()

    # ── orders ─────────────────────────────────────────────────────────────────────────────────────

    async def _listen(self) -> None:
        async for _ in attempts("listening for orders"):
            with contextlib.suppress(*Unreachable):
                async for order in self._state.orders():
                    if order is None:
                        self._resync()
                    elif (action := act_on_order(order, self._own(), self.epoch)) is not None:
                        self._do(action)

    async def _read_orders(self) -> None:
        """A full read a second, and at once after a new subscription."""
        while True:
            began_ns = time.monotonic_ns()
            with contextlib.suppress(*Unreachable):
                orders = await self._state.read_orders()
                for action in reconcile(orders, self._own(), self.epoch, began_ns):
                    self._do(action)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REREAD_S):
                    await self._reread.wait()
            self._reread.clear()

    def _resync(self) -> None:
        """After a new subscription or an outage: both sides tell each other everything."""
        self._outbox.put_again(self._statuses)
        self._reread.set()

    def _own(self) -> dict[WorkerId, Own]:
        return {
            worker: Own(state=status.state, seen_ns=self._seen_ns[worker]) for worker, status in self._statuses.items()
        }

    def _do(self, action: Action) -> None:
        match action:
            case Start(order):
                self._start(order)
            case Refuse(order, reason):
                log.info("order refused", extra={"worker": order.worker, "reason": reason})
                self._seen_ns[order.worker] = time.monotonic_ns()
                self._publish(_gone(order))
            case Tell(order):
                if order.worker in self._workers:
                    self._workers[order.worker].tell(order)
            case Drain(worker):
                if worker in self._workers:
                    self._workers[worker].drain()
            case Kill(worker):
                if worker in self._workers:
                    self._workers[worker].kill()
            case Forget(worker):
                self._statuses.pop(worker, None)
                self._seen_ns.pop(worker, None)
                self._outbox.put(worker, None)

    def _start(self, order: WorkerOrder) -> None:
        try:
            worker = Worker(order, self._host)
        except OSError as error:
            reason = Unavailable(f"node {self._config.node} cannot open a port for a stage: {error}", retry_after_s=1.0)
            self._publish(msgspec.structs.replace(_gone(order), state="failed", error=reason.info()))
            return
        self._workers[order.worker] = worker
        self._seen_ns[order.worker] = worker.seen_ns
        worker.start().add_done_callback(lambda _: self._ended(order.worker))
        self._lease_changed.set()

    def _ended(self, worker: WorkerId) -> None:
        self._workers.pop(worker, None)
        self._segments.room.memory.tend()
        self._lease_changed.set()

    # ── statuses and lease ─────────────────────────────────────────────────────────────────────────

    def _publish(self, status: WorkerStatus) -> None:
        self._seen_ns.setdefault(status.worker, time.monotonic_ns())
        self._statuses[status.worker] = status
        self._outbox.put(status.worker, status)
        self._spares.wake()

    async def _renew(self) -> None:
        """The lease, each second and at changes."""
        was_away = False
        while True:
            self._lease_changed.clear()
            try:
                await self._state.renew(self._report())
                if was_away:
                    log.warning("Redis is back, writing everything again")
                    self._resync()
                was_away = False
            except Unreachable as error:
                if not was_away:
                    log.warning("Redis is away, workers run on", extra={"error": str(error)})
                was_away = True
                await asyncio.sleep(AWAY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._lease_changed.wait()

    def _report(self) -> NodeReport:
        warm = {name: server.warm for name, server in self._servers.items() if server.warm is not None}
        return NodeReport(
            node=self._config.node,
            epoch=self.epoch,
            address=self._config.address,
            memory_bytes=self._config.memory_bytes,
            memory_used_bytes=self._workers_bytes() + self._segments.room.used_bytes,
            cpus=self._config.cpus,
            segments=self._segments.reports(),
            isolation=next((said.isolation for said in warm.values()), ""),
            limits=self._groups.name if self._groups is not None else "watched",
            profiles=sorted(warm),
            pid=os.getpid(),
            weights_memory=self._segments.room.memory.report(),
            bytes_per_s=self._segments.bandwidths.bytes_per_s(),
            disk_bytes=self._segments.disk_bytes,
            disk=self._segments.disk_ranges(),
            speeds=self._speeds.report(),
        )

    def _server_changed(self) -> None:
        self._lease_changed.set()
        self._spares.wake()

    def _starts_under_way(self) -> int:
        """Those that want the cores: what takes longer than `START_HURRY_S` waits for bytes, or for nothing."""
        since_ns = time.monotonic_ns() - int(START_HURRY_S * 1e9)
        return sum(worker.state == "starting" and worker.seen_ns > since_ns for worker in self._workers.values())

    def _workers_bytes(self) -> int:
        return sum(worker.reserved_bytes for worker in self._workers.values())

    # ── time and memory ────────────────────────────────────────────────────────────────────────────

    async def _flush_meters(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            for worker in self._workers.values():
                worker.flush()

    async def _watch_memory(self) -> None:
        """Only of workers that have no group to hold them."""
        while True:
            for worker in list(self._workers.values()):
                process = worker.body.process
                if process is None or process.group is not None or not process.pid:
                    continue
                if private_bytes(process.pid) > worker.order.spec.memory_bytes:
                    worker.body.killed_for_memory = True
                    process.kill()
            await asyncio.sleep(INTERVAL_S)

    # ── beginning and end ──────────────────────────────────────────────────────────────────────────

    async def _take_name(self, stop: asyncio.Event) -> None:
        """Waits for Redis as long as it takes. What a dead predecessor observed is no longer so."""
        async for _ in attempts("taking the node's name"):
            if stop.is_set():
                return
            with contextlib.suppress(*Unreachable):
                former = await self._state.report_of_predecessor()
                if former is not None and epoch_is_alive(former.epoch):
                    raise NodeTaken(f"node {self._config.node} is run by process {former.pid}: end it or set FS_NODE")
                await self._state.forget_former_statuses()
                return

    async def _end_workers(self) -> None:
        """Calls under way get a moment, then everything ends."""
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        for worker in list(self._workers.values()):
            worker.drain(self._config.shutdown_grace_s)
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.shutdown_grace_s)
        for worker in list(self._workers.values()):
            worker.kill()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WRITES_S)

    async def _write_last(self) -> None:
        with contextlib.suppress(TimeoutError, *Unreachable):
            async with asyncio.timeout(LAST_WRITES_S):
                await self._outbox.write_last()
                await self._state.leave(self.epoch)

    async def _guarded(self, loop: Awaitable[None]) -> None:
        """A loop of the daemon that ends by a fault ends the daemon: half a daemon is worse than none."""
        try:
            await loop
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the daemon failed")
            raise


async def _first_of(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Returns at `stop`; raises what a task raised before it."""
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done - {waiting}:
        task.result()


def _gone(order: WorkerOrder) -> WorkerStatus:
    return WorkerStatus(
        worker=order.worker,
        node=order.node,
        function=order.spec.name,
        version=order.version,
        state="gone",
        changed_unix_ns=time.time_ns(),
    )


def _disk_tier(config: Config) -> DiskTier | None:
    if config.disk_cache_bytes == 0:
        return None
    try:
        return DiskTier(config.state_dir / "checkpoints", config.disk_cache_bytes)
    except OSError as error:
        log.warning("checkpoints cannot be kept on the disk", extra={"error": str(error)})
        return None


def _open_groups(epoch: str) -> Groups | None:
    try:
        hierarchies = read_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        return open_groups(epoch, hierarchies)
    except (OSError, ValueError) as error:
        log.warning("control groups cannot be used, memory is watched", extra={"error": str(error)})
        return None


def _hidden(config: Config) -> tuple[str, ...]:
    """What no worker may see: the node's state, the store and the folder of Redis' socket."""
    hidden = [str(config.home)]
    if not config.store.startswith("s3://"):
        hidden.append(os.path.abspath(config.store.removeprefix("file://")))
    url = urlsplit(config.redis_url)
    if url.scheme == "unix" and len(Path(url.path).parent.parts) > 2:
        hidden.append(str(Path(url.path).parent))
    return tuple(dict.fromkeys(hidden))
