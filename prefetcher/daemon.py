"""The node daemon: wires the node's parts together, runs their loops, and shuts them down in order.

Redis may be unavailable at any time: workers keep running, writes wait, and all state is written again once Redis is
back. Only SIGTERM or a fault in the daemon itself ends it; its end frees every process and every byte of shared
memory that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Collection

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import BundleId, WorkerId
from fleetstart.runtime.contract.node.messages import READERS_SOCKET
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.process.tasks import end_tasks
from fleetstart.runtime.contract.store_url import is_s3

from .concurrency.threads import IoThread, in_thread
from .config import Config
from .control.copies import CopyKeeper
from .control.lease import NodeLease
from .control.lease_keeper import LeaseKeeper
from .control.metering import Metering
from .control.node_name import take_name
from .control.orders import OrderReconciler
from .control.outbox import Outbox
from .control.redis_state import LEASE_MS, REDIS_ERRORS, NodeState, connect
from .control.status_publisher import StatusPublisher
from .control.volume_records import VolumeRecords
from .daemon_parts import (
    descriptor_limit,
    fork_servers,
    open_egress,
    open_layers,
    open_node_certificate,
    open_node_cgroups,
    open_prefork_pool,
    open_segments,
    open_volumes,
)
from .devices.allocation import open_devices
from .diagnostics.startup import measure_link, measure_machine
from .network.ingress_proxy import NodeIngress
from .network.node_identity import NodeCertificate
from .network.tls_ingress import TlsIngress
from .node_report import report_of
from .peers.node_peers import NodePeers
from .processes.control_groups.groups import Cgroups
from .processes.epoch import new_epoch
from .processes.worker_logs import LogBuffer
from .segments.local_readers import LocalReaders
from .sources.base import Source
from .stage_links.relay import open_relays
from .volumes.session import VolumeNode
from .volumes.store_writer import open_writer
from .workers.bundles import BundleCache
from .workers.call_latency import CallLatencies
from .workers.layer_spares import LayerSpares
from .workers.memory_watchdog import watch
from .workers.meter import LedgerBuffer
from .workers.node_services import NodeServices
from .workers.secrets import SecretDecryptor
from .workers.worker import Worker

log = logging.getLogger(__name__)

START_RUSH_S = 10.0
"""A start that takes longer waits for bytes, not for the processor, and no longer holds back preforking."""
MEASURE_POLL_S = 0.25
MEASURE_AGAIN_S, MEASURE_AGAIN_MOST_S = 2.0, 600.0
"""A controller writes what is measured by; until it has, there is nothing to read. Pauses grow, as requests cost."""
LAST_WRITES_S = 2.0
"""Deadline at shutdown for the last statuses, log lines and ledger rows."""


class Daemon:
    """One node daemon. Owns every part of it."""

    def __init__(self, config: Config, source: Source) -> None:
        self._config = config
        self.epoch = new_epoch(os.urandom(4).hex())
        self._source = source
        self._measured: dict[str, float] = {}
        self._state = NodeState(connect(config.redis_url), config.node)
        self._cgroups: Cgroups | None = open_node_cgroups(self.epoch, config)
        self._keeper = LeaseKeeper(config.redis_url, config.node, lease_ms=LEASE_MS)
        self._lease = NodeLease(self._state, self._report, lambda: self._orders.resync(), self._keeper)
        self._workers: dict[WorkerId, Worker] = {}
        self._ledger = LedgerBuffer()
        self._latencies = CallLatencies()
        self._decryptor = SecretDecryptor()
        self._logs = LogBuffer()
        self._outbox = Outbox(self._state, self._logs, self._ledger)
        self._statuses = StatusPublisher(self._outbox)
        self._fork_servers = fork_servers(config, self._cgroups is not None, self._on_server_changed)
        self._prefork_pool = open_prefork_pool(config, self._fork_servers, self._cgroups, self._starts_under_way)
        self._layers = open_layers(config, source, lambda: self._layer_spares.give_up(), self._lease.changed)
        self._volumes = open_volumes(config, source, self._lease.changed)
        self._bundles = BundleCache(folder=config.state_dir / "bundles", source=source, in_use=self._bundles_in_use)
        self._layer_spares = LayerSpares(
            prefork_pool=self._prefork_pool,
            layers=self._layers,
            bundles=self._bundles,
            cpus=config.worker_threads,
            binding=lambda: self._devices.binding(()),
            room_bytes=lambda: self._segments.budget.free_bytes,
        )
        self._devices = open_devices(config.devices, config.worker_env, gpus=config.find_gpus)
        self._metering = Metering(self._state, self._workers.values, self._devices.used_by_process)
        self._peers = NodePeers(node=config.node, epoch=self.epoch, read_key=self._read_peer_key, rdma=config.rdma)
        self._segments = open_segments(
            config,
            source,
            workers_bytes=self._committed_bytes,
            reclaim=self._reclaim,
            changed=self._lease.changed,
            reject=self._reject,
            open_peer=self._peers.chunks,
        )
        self._readers = LocalReaders(config.home / READERS_SOCKET, self._segments)
        self._relays = open_relays(config.store, config.http)
        self._io_thread = IoThread()
        self._certificate: NodeCertificate | None = None
        self._tls_ingress: TlsIngress | None = None
        self._egress = open_egress(config, self._io_thread)
        self._copies = CopyKeeper(state=self._state, epoch=self.epoch, segments=self._segments)
        self._services = self._node_services()
        self._orders = OrderReconciler(
            state=self._state,
            epoch=self.epoch,
            services=self._services,
            workers=self._workers,
            statuses=self._statuses,
            changed=self._lease.changed,
        )

    def _node_services(self) -> NodeServices:
        """What workers use of the node."""
        config, records = self._config, VolumeRecords(self._state)
        return NodeServices(
            node=config.node,
            address=config.address,
            cpus=config.worker_threads,
            devices=self._devices,
            bundles=self._bundles,
            layers=self._layers,
            layer_spares=self._layer_spares,
            volumes=VolumeNode(
                cache=self._volumes,
                writer=open_writer(config.store),
                publish=records.publish,
                find=records.find,
            ),
            segments=self._segments,
            prefork_pool=self._prefork_pool,
            logs=self._logs,
            ledger=self._ledger,
            latencies=self._latencies,
            decryptor=self._decryptor,
            egress=self._egress,
            ingress=NodeIngress(self._io_thread, descriptor_limit()),
            tls_ingress=lambda: self._tls_ingress,
            relays=self._relays,
            publish=self._publish,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, then shuts down in order. Errors: NodeNameTaken if the node's name is in use."""
        servers = [asyncio.create_task(server.run(), name="server") for server in set(self._fork_servers.values())]
        try:
            certificate = self._certificate = await open_node_certificate(self._config, stop)
            if certificate is not None and self._config.needs_certificate:
                self._tls_ingress = TlsIngress(self._io_thread, certificate.context)
            encrypted = self._config.needs_certificate
            self._peers.open(self._config.address, certificate, self._segments, encrypted=encrypted)
            await take_name(self._state, self._config.node, stop)
            self._readers.open()
            self._keeper.start()
            loops = [
                *([self._certificate.run()] if self._certificate is not None else []),
                self._lease.renew(),
                self._orders.listen(),
                self._orders.read(),
                self._copies.listen(),
                self._copies.read(),
                self._outbox.write_statuses(),
                self._outbox.write_logs(),
                self._outbox.write_rows(),
                self._metering.flush(),
                self._metering.refresh_rates(),
                self._prefork_pool.run(),
                self._bundles.run(),
                self._layer_spares.run(),
                self._measure(),
                watch(lambda: list(self._workers.values())),
            ]
            tasks = [asyncio.create_task(self._guarded(loop)) for loop in loops]
            try:
                await _wait_for_stop(stop, tasks)
                log.info("shutting down", extra={"workers": len(self._workers)})
                await self._end_workers()
                await self._write_last()
            finally:
                await end_tasks(tasks)
        finally:
            if self._relays is not None:
                await asyncio.to_thread(self._relays.close)
            await asyncio.to_thread(self._io_thread.close)
            await self._peers.close()
            await self._readers.close()
            await self._layer_spares.close()
            await self._prefork_pool.close()
            await self._segments.close()
            for server in servers:
                server.cancel()  # once: each then ends its workers, which takes a while
            await asyncio.gather(*servers, return_exceptions=True)
            if self._cgroups is not None:
                self._cgroups.close()
            await self._state.close()

    # ── reports ────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, status: WorkerStatus) -> None:
        self._statuses.publish(status)
        self._prefork_pool.wake()

    def _report(self) -> NodeReport:
        return report_of(
            self._config,
            self.epoch,
            self._services,
            workers_bytes=self._workers_bytes(),
            preloaded_bytes=self._preloaded_bytes(),
            servers=self._fork_servers,
            cgroups=self._cgroups,
            measured=self._measured,
            peers=self._peers,
        )

    def _on_server_changed(self) -> None:
        self._lease.changed()
        self._prefork_pool.wake()

    def _starts_under_way(self) -> int:
        """Number of starts that compete for the processor: those younger than `START_RUSH_S`."""
        since_ns = time.monotonic_ns() - int(START_RUSH_S * 1e9)
        return sum(worker.state == "starting" and worker.record.seen_ns > since_ns for worker in self._workers.values())

    def _workers_bytes(self) -> int:
        return sum(worker.resources.reserved_bytes for worker in self._workers.values())

    def _committed_bytes(self) -> int:
        """Memory of workers, and of what was imported ahead of them."""
        return self._workers_bytes() + self._preloaded_bytes()

    def _preloaded_bytes(self) -> int:
        return self._layer_spares.used_bytes + self._prefork_pool.preloaded_bytes

    def _bundles_in_use(self) -> frozenset[BundleId]:
        """Those of its workers, and of what waits for a start of its version."""
        started = {worker.order.spec.bundle for worker in self._workers.values()}
        return frozenset(started | self._layer_spares.bundles)

    def _reclaim(self, needed_bytes: int) -> None:
        """Gives up what was imported ahead: the next start of its functions takes longer, and this one begins."""
        freed_bytes = self._layer_spares.reclaim(needed_bytes)
        if freed_bytes < needed_bytes:
            self._prefork_pool.reclaim(needed_bytes - freed_bytes)

    async def _read_peer_key(self) -> bytes | None:
        """The key that grants of this epoch are signed with; None if there is none, or it cannot be read now."""
        try:
            sealed = await self._state.read_peer_key(self.epoch)
            return self._decryptor.peer_key(sealed, self._config.node, self.epoch) if sealed is not None else None
        except (*REDIS_ERRORS, FleetError) as error:
            log.warning("the key of peers' grants cannot be read", extra={"error": str(error)})
            return None

    # ── periodic work ──────────────────────────────────────────────────────────────────────────────

    def _reject(self, workers: Collection[WorkerId], error: FleetError) -> None:
        """Stops workers whose weights are forged."""
        for worker in workers:
            if (found := self._workers.get(worker)) is not None:
                found.reject(error)

    async def _measure(self) -> None:
        """Measures the machine once its fork servers are warm, and its link to the store as soon as that can be."""
        config, remote = self._config, is_s3(self._config.store)
        while not (self._prefork_pool.is_quiet and any(server.warm for server in self._fork_servers.values())):
            await asyncio.sleep(MEASURE_POLL_S)
        self._measured.update(await in_thread(lambda: measure_machine(config.home, config.store), "measure"))
        self._lease.changed()
        again_s = MEASURE_AGAIN_S
        while remote and not (rate := await in_thread(lambda: measure_link(self._source), "measure")):
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, MEASURE_AGAIN_MOST_S)
        if remote:
            self._measured["store"] = rate
            self._lease.changed()
        await asyncio.Event().wait()  # a loop that ends, ends the daemon

    # ── startup and shutdown ───────────────────────────────────────────────────────────────────────

    async def _end_workers(self) -> None:
        """Drains all workers for the grace period, then kills them."""
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
        await asyncio.to_thread(self._keeper.close)
        with contextlib.suppress(TimeoutError, *REDIS_ERRORS):
            async with asyncio.timeout(LAST_WRITES_S):
                await self._outbox.flush_all()
                await self._state.release_lease(self.epoch)

    async def _guarded(self, loop: Awaitable[None]) -> None:
        """Runs one loop. A fault in it ends the daemon: half a daemon is worse than none."""
        try:
            await loop
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the daemon failed")
            raise


async def _wait_for_stop(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Returns when `stop` is set; raises the error of a task that fails before."""
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done - {waiting}:
        task.result()
