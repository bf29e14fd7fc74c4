"""A cluster for tests of scheduling decisions: the view and a clock that the test moves; no Redis, no processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from fleetstart.controller.scheduler.reconcile import Reconciler
from fleetstart.controller.scheduler.step import Step
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.view import NodeSeen, View
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec, LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, NodeReport
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.controller.scheduler.test_autoscaler import spec

F = FunctionName("f")


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self._unix_ns = 1_700_000_000_000_000_000
        self._monotonic_ns = 0

    def advance(self, seconds: float) -> None:
        step_ns = round(seconds * 1e9)
        self._unix_ns += step_ns
        self._monotonic_ns += step_ns

    def step(self, seconds: float) -> None:
        """The time of day is set; no time passes."""
        self._unix_ns += round(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def unix_ns(self) -> int:
        return self._unix_ns


class Cluster:
    """A world in which orders are obeyed when the test says so."""

    def __init__(self, nodes: int = 1, memory_mib: int = 4096) -> None:
        self.clock = ManualClock()
        self.view = View()
        self.view.synced = True
        self.reconciler = Reconciler()
        for i in range(nodes):
            name = NodeId(f"n{i}")
            self.view.nodes[name] = NodeSeen(
                NodeReport(node=name, epoch="e", address="", memory_bytes=memory_mib * MIB, memory_used_bytes=0, cpus=1)
            )

    def deploy(self, version: int = 1, **fields: object) -> FunctionSpec:
        deployed = spec(**fields)
        self.view.functions[F] = FunctionRecord(name=F, live=Version(version), deployed_unix_ms=0)
        self.view.versions[VersionKey(F, Version(version))] = VersionRecord(
            version=Version(version), digest="", spec=deployed, segment_bytes=0, created_unix_ms=0
        )
        return deployed

    def load(self, queued: int, running: int = 0, version: int = 1, waited_s: float = 0.0) -> None:
        oldest_unix_ms = self.clock.unix_ns() // 1_000_000 - round(waited_s * 1000)
        load = FunctionLoad(queued, running, oldest_unix_ms=oldest_unix_ms if queued else 0)
        loads = {f"f@{version}": load} if queued or running else {}
        self.view.put_gateway(GatewayReport(gateway="g", loads=loads), self.clock.monotonic_ns())

    def step(self, keys: list[VersionKey] | None = None, *, read: bool = True) -> Step:
        """A step over those versions, or over all, carried out; `read`: after a read that found what the view has."""
        now_ns, now_unix_ns = self.clock.monotonic_ns(), self.clock.unix_ns()
        if read:
            self.view.synced_ns = now_ns
        step = self.reconciler.step(self.view, now_ns=now_ns, now_unix_ns=now_unix_ns, keys=keys)
        for key, failure in step.failures:
            if failure is None:
                self.view.failures.pop(key, None)
            else:
                self.view.failures[key] = failure
        for order in step.orders:
            self.view.put_order(order)
        for order in step.deleted_orders:
            self.view.drop_order(order.worker)
        return step

    def obey(self, state: WorkerState = "ready", error: ErrorInfo | None = None) -> None:
        for order in self.view.orders.values():
            wanted: WorkerState = {"run": state, "standby": "standby", "drain": "gone"}[order.wanted]
            self.view.put_status(
                WorkerStatus(
                    worker=order.worker,
                    node=order.node,
                    function=F,
                    version=order.version,
                    state=wanted,
                    error=error,
                    memory_bytes=100 * MIB if wanted == "standby" else 0,
                    changed_unix_ns=self.clock.unix_ns(),
                )
            )

    def wanted(self) -> dict[str, int]:
        """Number of orders by what they want."""
        return dict(Counter(order.wanted for order in self.view.orders.values()))

    def workers(self) -> list[WorkerId]:
        return [order.worker for order in self.view.orders.values() if order.wanted == "run"]


def pipelined(cluster: Cluster, **fields: Any) -> FunctionSpec:
    """A model of four layers that takes long to fetch: worth a pipeline wherever there are nodes."""
    deployed = cluster.deploy(
        weights=CheckpointId("0" * 64), llm=LLMSettings(kv_memory_bytes=MIB), memory_bytes=64 * MIB, **fields
    )
    key = VersionKey(F, Version(1))
    layout = LayerLayout(0, [100 * MIB] * 4, [], [])
    cluster.view.versions[key] = msgspec.structs.replace(
        cluster.view.versions[key], segment_bytes=400 * MIB, layout=layout
    )
    return deployed


def stages_of(cluster: Cluster) -> list[tuple[int, str, bool]]:
    """(index, what is wanted, whether it grows) of every order, by worker's place in its pipeline."""
    orders = [order for order in cluster.view.orders.values() if order.stage is not None]
    return sorted((order.stage.index, order.wanted, order.grow) for order in orders if order.stage)
