"""A simulated node: the product's exchange with the controllers, over simulated workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from fleetstart.prefetcher.control.lease import NodeLease
from fleetstart.prefetcher.control.metering import Metering
from fleetstart.prefetcher.control.node_name import take_name
from fleetstart.prefetcher.control.orders import OrderReconciler
from fleetstart.prefetcher.control.outbox import Outbox
from fleetstart.prefetcher.control.redis_state import REPLY_TIMEOUT_S, NodeState
from fleetstart.prefetcher.control.status_publisher import StatusPublisher
from fleetstart.prefetcher.devices.allocation import DeviceAllocator
from fleetstart.prefetcher.processes.worker_logs import LogBuffer
from fleetstart.prefetcher.workers.call_latency import CallLatencies
from fleetstart.prefetcher.workers.meter import LedgerBuffer
from fleetstart.prefetcher.workers.node_services import NodeServices
from fleetstart.runtime.contract.ids import NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.process.tasks import run_all
from fleetstart.runtime.contract.sizes import MIB
from tests.simulation.processes import Process
from tests.simulation.store.client import Client
from tests.simulation.weights import NodeWeights
from tests.simulation.workers import SimulatedWorker

MEMORY_BYTES = 8192 * MIB


class SimulatedNode:
    """One start of a node's daemon."""

    def __init__(self, world: Any, process: Process, name: str, epoch: str) -> None:
        self.world = world
        self.process = process
        self.name = NodeId(name)
        self.epoch = epoch
        self.client = Client(world.loop, world.server, world.network, process, retries=0, timeout_s=REPLY_TIMEOUT_S)
        self.state = NodeState(cast(Any, self.client), self.name)
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.weights = NodeWeights(world, process, self.client, self.name, epoch)
        self.ledger = LedgerBuffer()
        logs = LogBuffer()
        outbox = Outbox(self.state, logs, self.ledger)
        self.statuses = StatusPublisher(outbox)
        memory = SimpleNamespace(replenish=lambda: None)
        self.services = cast(
            NodeServices,
            SimpleNamespace(
                node=self.name,
                logs=logs,
                ledger=self.ledger,
                latencies=CallLatencies(),
                devices=DeviceAllocator(()),
                segments=SimpleNamespace(budget=SimpleNamespace(memory=memory)),
            ),
        )
        lease = NodeLease(self.state, self.report, lambda: orders.resync())
        metering = Metering(self.state, lambda: cast(Any, self.workers).values())
        orders = OrderReconciler(
            state=self.state,
            epoch=epoch,
            services=self.services,
            workers=cast(Any, self.workers),
            statuses=self.statuses,
            changed=lease.changed,
            worker_of=cast(Any, lambda order, services: self._worker(order)),
        )
        self._loops = [
            lease.renew, orders.listen, orders.read, outbox.write_statuses, outbox.write_logs, outbox.write_rows,
            metering.flush, metering.refresh_rates,
        ]  # fmt: skip
        self._serves_peers = any(one.keeps for one in world.plan.functions)
        if self._serves_peers:
            self._loops.append(self.weights.follow_copies)

    def _worker(self, order: WorkerOrder) -> SimulatedWorker:
        return SimulatedWorker(order, self)

    def report(self) -> NodeReport:
        used_bytes = sum(worker.reserved_bytes for worker in self.workers.values())
        return NodeReport(
            node=self.name,
            epoch=self.epoch,
            machine="simulated",
            address=self.process.name,
            memory_bytes=MEMORY_BYTES,
            memory_used_bytes=used_bytes,
            segments=self.weights.reports(),
            peer_address=f"{self.process.name}:7000" if self._serves_peers else "",
            public_key="simulated",
            cpus=8,
            measured={"store": 1e9, "disk": 1e9, "memory": 1e10},
        )

    async def run(self) -> None:
        await take_name(self.state, self.name, asyncio.Event())
        await run_all(*(loop() for loop in self._loops))
