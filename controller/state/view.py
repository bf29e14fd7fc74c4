"""The view: an in-memory copy of the state in Redis, so that calls never wait for Redis.

Written by `StateSync` (full resyncs and publications) and by the process's own writes; read by gateway, scheduler and
API. Listeners are called at once on changes. While Redis is unavailable the view stays as it was, and hot functions
are served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast
from weakref import WeakSet

from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, NodeReport

from ..planner.estimates import NodeMeasures, VersionMeasures
from .access_table import EMPTY, AccessTable
from .identity_records import NodeIdentity, PeerKeyRecord
from .records import Failure, FunctionRecord, VersionKey, VersionRecord, parse_version_key
from .traffic import tracked_versions
from .unreadable import UnreadableRecords
from .view_index import Changes, Groups, WatchedDict

NODE_GRACE_NS = 2_000_000_000
"""Grace period after a node's lease has expired. Leases are renewed once a second, so one renewal may be late."""
GATEWAY_LEASE_MS = 3_000
"""Lease of a gateway's report, in Redis and in each view."""
ENDED_KEPT = 1024
"""Number of final worker statuses that are kept, so that a call can be answered with the reason of its worker's end."""


CopyKey = tuple[NodeId, CheckpointId]


@dataclass(slots=True)
class NodeSeen:
    """A node's last report, and since when its lease has been missing."""

    report: NodeReport
    absent_since_ns: int | None = None
    """Monotonic time at which its lease was first missing."""

    def lost(self, now_ns: int) -> bool:
        return self.absent_since_ns is not None and now_ns - self.absent_since_ns > NODE_GRACE_NS


class View:
    def __init__(self) -> None:
        self.synced = False
        """True if Redis was read at least once."""
        self.synced_ns = 0
        """Monotonic time of the last full read."""
        self.written_ns = 0
        """Monotonic time at which Redis last took a write of this process, which writes once a second."""
        self.redis = "not reached yet"
        self.leader = ""
        self._followers: WeakSet[Changes] = WeakSet()
        self.functions: WatchedDict[FunctionName, FunctionRecord] = WatchedDict(self._function_changed)
        self.versions: WatchedDict[VersionKey, VersionRecord] = WatchedDict(self._version_changed)
        self.failures: WatchedDict[VersionKey, Failure] = WatchedDict(self._version_changed)
        self.nodes: WatchedDict[NodeId, NodeSeen] = WatchedDict(self._node_changed)
        self.node_names: frozenset[NodeId] = frozenset()
        """All nodes that were ever seen and not removed."""
        self._draining: frozenset[NodeId] = frozenset()
        self.identities: dict[NodeId, NodeIdentity] = {}
        """Nodes that the system vouches for: those that have joined and were not removed."""
        self.unread_nodes: frozenset[NodeId] = frozenset()
        """Nodes that live, and whose reports this release cannot read: they keep their workers."""
        self.unreadable = UnreadableRecords()
        """Records in Redis that this release cannot read."""
        self.orders: WatchedDict[WorkerId, WorkerOrder] = WatchedDict(self._order_changed)
        self.statuses: WatchedDict[WorkerId, WorkerStatus] = WatchedDict(self._status_changed)
        self._orders_by_version: Groups[WorkerId, WorkerOrder] = Groups(_version_of_order)
        self._orders_by_node: Groups[WorkerId, WorkerOrder] = Groups(lambda order: order.node)
        self._statuses_by_function: Groups[WorkerId, WorkerStatus] = Groups(lambda status: status.function)
        self.copies: WatchedDict[CopyKey, CopyOrder] = WatchedDict(self._copy_changed)
        """Copies of checkpoints that nodes are to hold."""
        self._copies_by_node: Groups[CopyKey, CopyOrder] = Groups(lambda copy: copy.node)
        self.peer_keys: dict[NodeId, PeerKeyRecord] = {}
        self.shell_orders: dict[WorkerId, WorkerOrder] = {}
        self.shell_statuses: dict[WorkerId, WorkerStatus] = {}
        """Statuses of shell workers, kept apart because they serve no calls."""
        self.async_calls: Mapping[FunctionName, int] = {}
        """Async calls of each function that wait or run, as the runner of this controller saw last."""
        self.gateways: dict[str, tuple[GatewayReport, int]] = {}
        self._loads: dict[str, FunctionLoad] | None = None
        """Sums over the gateways, until a report changes them."""
        self.node_measures: dict[NodeId, NodeMeasures] = {}
        self.version_measures: dict[VersionKey, VersionMeasures] = {}
        """The planner's estimates of nodes and versions."""
        self.access: AccessTable = EMPTY
        """Keys, projects, secrets and volumes."""
        self.was_ready: set[WorkerId] = set()
        self.ended: OrderedDict[WorkerId, WorkerStatus] = OrderedDict()
        self.touched: set[WorkerId] = set()
        """Workers updated since the last resync began, which may have older data of them."""
        self.touched_orders: set[WorkerId] = set()
        """Those of which an order was: a status alone says nothing of an order that is not known yet."""
        self._worker_listeners: list[Callable[[WorkerStatus], None]] = []
        self._shell_listeners: list[Callable[[WorkerStatus], None]] = []
        self._listeners: list[Callable[[], None]] = []

    def on_worker(self, listener: Callable[[WorkerStatus], None]) -> None:
        """Called for each status that is new or different, before `on_change`."""
        self._worker_listeners.append(listener)

    def on_shell(self, listener: Callable[[WorkerStatus], None]) -> None:
        """Called for each status of a shell that is new or different."""
        self._shell_listeners.append(listener)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    # ── what has changed ───────────────────────────────────────────────────────────────────────────

    def follow(self) -> Changes:
        """A record of changes from now on, for one reader, as long as the reader keeps it."""
        changes = Changes()
        self._followers.add(changes)
        return changes

    def _mark_version(self, key: VersionKey) -> None:
        for changes in self._followers:
            changes.versions.add(key)

    def _function_changed(
        self, name: FunctionName, before: FunctionRecord | None, after: FunctionRecord | None
    ) -> None:
        versions = {v for record in (before, after) if record is not None for v in tracked_versions(record)}
        # An older version may still have workers, for calls that were let in before: no record names it.
        versions |= {status.version for status in self.statuses_of(name).values()}
        for changes in self._followers:
            changes.functions.add(name)
            changes.versions.update(VersionKey(name, version) for version in versions)

    def _version_changed(self, key: VersionKey, before: object, after: object) -> None:
        for changes in self._followers:
            changes.functions.add(key.name)
            changes.versions.add(key)

    def _order_changed(self, worker: WorkerId, before: WorkerOrder | None, after: WorkerOrder | None) -> None:
        self._orders_by_version.note(worker, before, after)
        self._orders_by_node.note(worker, before, after)
        for order in (before, after):
            if order is not None:
                for changes in self._followers:
                    changes.versions.add(_version_of_order(order))
                    changes.nodes.add(order.node)

    def _status_changed(self, worker: WorkerId, before: WorkerStatus | None, after: WorkerStatus | None) -> None:
        self._statuses_by_function.note(worker, before, after)
        status = after or before
        assert status is not None
        for changes in self._followers:
            changes.versions.add(VersionKey(status.function, status.version))
            changes.nodes.add(status.node)
            changes.functions.add(status.function)

    def _copy_changed(self, key: CopyKey, before: CopyOrder | None, after: CopyOrder | None) -> None:
        self._copies_by_node.note(key, before, after)
        for changes in self._followers:
            changes.nodes.add(key[0])

    def _node_changed(self, node: NodeId, before: NodeSeen | None, after: NodeSeen | None) -> None:
        stays = before is not None and after is not None and before.report.epoch == after.report.epoch
        if stays and before is not None and before.absent_since_ns is None:
            for changes in self._followers:
                changes.nodes.add(node)
        else:
            self.node_came_or_went(node)

    def node_came_or_went(self, node: NodeId) -> None:
        """Notes that a node's lease, or whether it drains, is different: what is to become of its workers may be."""
        for changes in self._followers:
            changes.nodes.add(node)
            changes.versions.update(_version_of_order(order) for order in self.orders_on(node).values())

    def quotas_changed(self) -> None:
        """Notes that projects have other quotas: what their versions may have is different."""
        for changes in self._followers:
            changes.versions.update(self.ordered_versions())

    @property
    def draining(self) -> frozenset[NodeId]:
        """Nodes that get no workers, and lose those that they have."""
        return self._draining

    @draining.setter
    def draining(self, nodes: frozenset[NodeId]) -> None:
        changed, self._draining = self._draining ^ nodes, nodes
        for node in changed:
            self.node_came_or_went(node)

    # ── by what they have in common ────────────────────────────────────────────────────────────────

    def orders_of(self, key: VersionKey) -> Mapping[WorkerId, WorkerOrder]:
        """The orders of a version."""
        return self._orders_by_version.of(key)

    def ordered_versions(self) -> Iterator[VersionKey]:
        """The versions that have orders."""
        return cast(Iterator[VersionKey], iter(self._orders_by_version))

    def orders_on(self, node: NodeId) -> Mapping[WorkerId, WorkerOrder]:
        """The orders for a node."""
        return self._orders_by_node.of(node)

    def copies_on(self, node: NodeId) -> Mapping[CopyKey, CopyOrder]:
        """The copies that a node is to hold."""
        return self._copies_by_node.of(node)

    def statuses_of(self, name: FunctionName) -> Mapping[WorkerId, WorkerStatus]:
        """The statuses of a function's workers, of all its versions."""
        return self._statuses_by_function.of(name)

    def live(self, name: FunctionName) -> VersionRecord | None:
        record = self.functions.get(name)
        return self.versions.get(VersionKey(name, record.live)) if record else None

    def put_status(self, status: WorkerStatus, *, touch: bool = True) -> bool:
        """Stores a status unless a newer one is known; True if it changes anything.

        `touch` is False for a full read, which is newer than what is known of workers that were not touched since it
        began.
        """
        if status.shell:
            self._put_shell_status(status, touch=touch)
            return False
        known = self.statuses.get(status.worker) or self.ended.get(status.worker)
        if known is status:
            return False
        if known is not None and not self._is_news(status, known, read=not touch):
            return False
        if touch:
            self.touched.add(status.worker)
        if known == status:
            return False
        self.statuses[status.worker] = status
        if status.state == "ready":
            self.was_ready.add(status.worker)
        if status.state in FINAL:
            self.ended[status.worker] = status
            while len(self.ended) > ENDED_KEPT:
                self.ended.popitem(last=False)
        for listener in self._worker_listeners:
            listener(status)
        return True

    def _is_news(self, status: WorkerStatus, known: WorkerStatus, *, read: bool) -> bool:
        if read and status.worker not in self.touched:
            return known.state not in FINAL
        return status.replaces(known)

    def _put_shell_status(self, status: WorkerStatus, *, touch: bool) -> None:
        known = self.shell_statuses.get(status.worker)
        if known is not None and (known == status or not self._is_news(status, known, read=not touch)):
            return
        if touch:
            self.touched.add(status.worker)
        self.shell_statuses[status.worker] = status
        for listener in self._shell_listeners:
            listener(status)

    def drop_status(self, worker: WorkerId) -> None:
        """Removes a status that its node has removed. Listeners get it as `gone`."""
        status = self.statuses.pop(worker, None)
        self.was_ready.discard(worker)
        if status is not None and status.state not in FINAL:
            for listener in self._worker_listeners:
                listener(_gone(status))

    def put_order(self, order: WorkerOrder) -> None:
        (self.shell_orders if order.shell else self.orders)[order.worker] = order
        self.touched.add(order.worker)
        self.touched_orders.add(order.worker)

    def drop_order(self, worker: WorkerId) -> None:
        self.orders.pop(worker, None)
        self.shell_orders.pop(worker, None)
        self.touched.add(worker)
        self.touched_orders.add(worker)

    def put_gateway(self, report: GatewayReport, now_ns: int) -> bool:
        """Returns whether it says something new: most reports say that a gateway lives."""
        known = self.gateways.get(report.gateway)
        self.gateways[report.gateway] = (report, now_ns)
        return self._loads_changed(known[0].loads if known is not None else {}, report.loads) or known is None

    def forget_gateways(self, now_ns: int) -> None:
        for gateway, (report, seen_ns) in list(self.gateways.items()):
            if now_ns - seen_ns > GATEWAY_LEASE_MS * 1_000_000:
                del self.gateways[gateway]
                self._loads_changed(report.loads, {})

    def _loads_changed(self, before: Mapping[str, FunctionLoad], after: Mapping[str, FunctionLoad]) -> bool:
        if before is after:  # changed in place: what it was is not known
            before = {}
        changed = [text for text in before.keys() | after.keys() if before.get(text) != after.get(text)]
        if changed:
            self._loads = None
        for text in changed:
            key = parse_version_key(text)
            if key is not None:
                self._mark_version(key)
        return bool(changed)

    def loads(self) -> Mapping[str, FunctionLoad]:
        """Sums over the gateways, keyed `name@version`."""
        if self._loads is None:
            total: dict[str, FunctionLoad] = {}
            for report, _ in self.gateways.values():
                for key, load in report.loads.items():
                    known = total.get(key)
                    total[key] = load if known is None else _sum(known, load)
            self._loads = total
        return self._loads

    def running_elsewhere(self, worker: WorkerId, key: VersionKey, gateway: str) -> int:
        """Calls of other gateways on a worker, by their last reports."""
        text = str(key)
        return sum(
            report.loads[text].per_worker.get(worker, 0)
            for name, (report, _) in self.gateways.items()
            if name != gateway and text in report.loads
        )

    def worker_lost(self, worker: WorkerId, node: NodeId, epoch: str | None, now_ns: int) -> bool:
        """Checks whether a worker is lost: its node is dead, or its daemon was restarted since the order."""
        if node in self.unread_nodes:
            return False
        seen = self.nodes.get(node)
        if seen is None:
            return self.synced
        return seen.lost(now_ns) or (epoch is not None and seen.report.epoch != epoch)


def _version_of_order(order: WorkerOrder) -> VersionKey:
    return VersionKey(order.spec.name, order.version)


def _gone(status: WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker=status.worker, node=status.node, function=status.function, version=status.version, state="gone"
    )


def _sum(one: FunctionLoad, other: FunctionLoad) -> FunctionLoad:
    waiting = [load for load in (one, other) if load.oldest_unix_ms]
    oldest = min(waiting, key=lambda load: load.oldest_unix_ms, default=one)
    per_worker = dict(one.per_worker)
    for worker, calls in other.per_worker.items():
        per_worker[worker] = per_worker.get(worker, 0) + calls
    return FunctionLoad(
        one.queued + other.queued,
        one.running + other.running,
        per_worker,
        one.recent + other.recent,
        max(one.call_s, other.call_s),
        oldest.oldest_unix_ms,
        oldest.oldest,
    )
