"""The planner's cluster, kept up to date in place: a node's state is derived anew when something of it has changed.

To derive all of a thousand nodes takes some 70 ms, in the loop that serves calls.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import defaultdict

from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder

from ..planner.checkpoint_layout import CheckpointLayout
from ..planner.cluster import Cluster
from ..planner.devices import mean_speeds
from ..planner.estimates import FleetMeasures, NodeMeasures, fleet_measures, node_prior
from ..planner.links.contention import PendingFetch
from ..planner.links.uplinks import PairRate, pair_rates
from ..planner.node_state import node_state, uplink
from ..planner.order_state import OrderState
from ..planner.peers import uploads
from ..planner.plan import Plan, PlanRequest
from ..state.records import VersionKey
from ..state.view import View
from .start_orders import layout_in, reserve

log = logging.getLogger(__name__)

PRIOR_NS = 10_000_000_000
"""Interval at which the estimates of nodes without starts are made anew from those of the others."""
NODES_AT_ONCE = 20
"""Nodes that get new estimates of that kind in one turn of the loop, some milliseconds: until then, older ones do."""
FLEET_NS = 5_000_000_000
"""Age of estimates over all versions: to make them takes milliseconds where versions are many."""


class LiveCluster:
    """The live nodes that take workers, with the orders on them."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.layouts: dict[CheckpointId, CheckpointLayout] = {}
        """Layouts of the checkpoints of all versions that were read."""
        self._versions: set[VersionKey] = set()
        self._cluster = Cluster()
        self._changes = view.follow()
        self._changes.nodes.update(view.nodes)
        self._changes.versions.update(view.versions)
        self._measures: dict[NodeId, NodeMeasures | None] = {}
        self._prior = NodeMeasures()
        self._prior_ns: int | None = None
        self._with_older_prior: list[NodeId] = []
        self._faults: dict[NodeId, str] = {}
        self._reads: dict[NodeId, list[tuple[NodeId, PendingFetch]]] = {}
        """What each node still fetches from which other ones."""
        self._uploads: defaultdict[NodeId, dict[NodeId, list[PendingFetch]]] = defaultdict(dict)
        """The same by the node that it is fetched from, and by its reader."""
        self._pairs: dict[NodeId, dict[NodeId, PairRate]] = {}
        """The rate at which each node has read from which other ones, as it reports it."""
        self._read_at: defaultdict[NodeId, dict[NodeId, PairRate]] = defaultdict(dict)
        """The same by the node that was read from, and by its reader."""

    def refreshed(self, now_ns: int, now_unix_ns: int) -> Cluster:
        """The cluster as it is now."""
        stale = self._changes.take_nodes() | self._relearned(now_ns) | self._relaid()
        for node in stale:
            try:
                self._refresh(node, now_ns, now_unix_ns)
                self._faults.pop(node, None)
            except Exception as error:  # one node's report must not stop the starts on others
                self._cluster.drop(node)
                self._share_uplinks(node, [], now_ns)
                if self._faults.get(node) != repr(error):
                    log.exception("a node cannot be planned on", extra={"node": node})
                self._faults[node] = repr(error)
        return self._cluster

    def _share_uplinks(self, reader: NodeId, reads: list[tuple[NodeId, PendingFetch]], now_ns: int) -> None:
        """Notes what a node fetches from others, on the uplinks of these."""
        before = self._reads.pop(reader, [])
        if reads:
            self._reads[reader] = reads
        by_holder: dict[NodeId, list[PendingFetch]] = {holder: [] for holder, _ in before}
        for holder, fetch in reads:
            by_holder.setdefault(holder, []).append(fetch)
        for holder, fetches in by_holder.items():
            if fetches:
                self._uploads[holder][reader] = fetches
            else:
                self._uploads[holder].pop(reader, None)
            self._renew_uplink(holder, now_ns)

    def _share_rates(self, reader: NodeId, pairs: dict[NodeId, PairRate], now_ns: int) -> None:
        """Notes how fast a node has read from others, on the uplinks of these."""
        before = self._pairs.pop(reader, {})
        if pairs:
            self._pairs[reader] = pairs
        for holder in before.keys() | pairs.keys():
            if before.get(holder) == pairs.get(holder):
                continue
            if holder in pairs:
                self._read_at[holder][reader] = pairs[holder]
            else:
                self._read_at[holder].pop(reader, None)
            self._renew_uplink(holder, now_ns)

    def _renew_uplink(self, holder: NodeId, now_ns: int) -> None:
        state = self._cluster.get(holder)
        if state is not None and state.up is not None:
            read_at = self._read_at[holder].values()
            up = uplink(state.down_bytes_per_s, read_at, self._uploads_of(holder), now_ns / 1e9)
            self._cluster.put(dataclasses.replace(state, up=up))

    def _uploads_of(self, holder: NodeId) -> list[PendingFetch]:
        return [fetch for fetches in self._uploads[holder].values() for fetch in fetches]

    def changed(self, node: NodeId) -> None:
        """Notes that the node's state was changed by a plan, and must be derived anew from what came of it."""
        self._changes.nodes.add(node)

    def _refresh(self, node: NodeId, now_ns: int, now_unix_ns: int) -> None:
        view, seen = self.view, self.view.nodes.get(node)
        if seen is None or seen.absent_since_ns is not None or node in view.draining:
            self._cluster.drop(node)
            self._measures.pop(node, None)
            self._share_uplinks(node, [], now_ns)
            self._share_rates(node, {}, now_ns)
            return
        orders = []
        for order in view.orders_on(node).values():
            record = view.versions.get(VersionKey(order.spec.name, order.version))
            if record is not None:
                status = view.statuses.get(order.worker) or view.ended.get(order.worker)
                orders.append(OrderState(order=order, status=status, layout=layout_in(self.layouts, record)))
        known = self._measures[node] = view.node_measures.get(node)
        state = node_state(
            seen.report,
            orders,
            known if known is not None else self._prior,
            layouts=self.layouts,
            now_s=now_ns / 1e9,
            now_unix_ns=now_unix_ns,
            uploads=self._uploads_of(node) if node in self._uploads else (),
            copies=[copy.checkpoint for copy in view.copies_on(node).values() if copy.epoch == seen.report.epoch],
            read_at=self._read_at[node].values() if node in self._read_at else (),
        )
        self._cluster.put(state)
        if node in self._reads or any(ordered.order.sources for ordered in orders):
            self._share_uplinks(node, uploads(state, orders), now_ns)
        if pairs := pair_rates(seen.report.bytes_per_s):
            self._share_rates(node, pairs, now_ns)
        elif node in self._pairs:
            self._share_rates(node, {}, now_ns)

    def _relearned(self, now_ns: int) -> set[NodeId]:
        """The nodes whose estimates are other ones."""
        measures = self.view.node_measures
        stale = {node for node, used in self._measures.items() if measures.get(node) is not used}
        if self._prior_ns is None or now_ns - self._prior_ns > PRIOR_NS:
            self._prior_ns = now_ns
            prior = node_prior(list(measures.values()))
            if prior != self._prior:
                self._prior = prior
                self._with_older_prior = [node for node, used in self._measures.items() if used is None]
        some, self._with_older_prior = self._with_older_prior[:NODES_AT_ONCE], self._with_older_prior[NODES_AT_ONCE:]
        return stale.union(some)

    def _relaid(self) -> set[NodeId]:
        """The nodes with orders of versions that are new, or that hold checkpoints whose layouts are."""
        changed = self._changes.take_versions()
        if not changed:
            return set()
        known, stale = set(self.layouts), set[NodeId]()
        for key in changed:
            record = self.view.versions.get(key)
            if record is None:
                self._versions.discard(key)
            elif key not in self._versions:  # orders may have come before it
                self._versions.add(key)
                if record.spec.weights is not None:
                    layout_in(self.layouts, record)
                stale.update(order.node for order in self.view.orders_of(key).values())
        new = self.layouts.keys() - known
        if not new:
            return stale
        holders: dict[CheckpointId, set[NodeId]] = defaultdict(set)
        for node, seen in self.view.nodes.items():
            for checkpoint in (*(segment.checkpoint for segment in seen.report.segments), *seen.report.disk):
                holders[checkpoint].add(node)
        for node, checkpoint in self.view.copies:
            holders[checkpoint].add(node)
        return stale.union(*(holders.get(checkpoint, set()) for checkpoint in new))


class FleetCache:
    """Estimates over all versions, made anew once in a while: they change little by one start."""

    def __init__(self) -> None:
        self._made_ns = 0
        self._of: object = None
        self._count = -1
        self._known = fleet_measures(())

    def of(self, view: View, now_ns: int) -> FleetMeasures:
        measures = view.version_measures
        if measures is not self._of or len(measures) != self._count or now_ns - self._made_ns > FLEET_NS:
            self._made_ns, self._of, self._count = now_ns, measures, len(measures)
            devices = (device for seen in view.nodes.values() for device in seen.report.devices)
            self._known = fleet_measures(measures.values(), mean_speeds(devices))
        return self._known


class PlanningContext:
    """The cluster that a step's starts are planned on, made on first use: most steps start nothing."""

    def __init__(self, live: LiveCluster, fleet: FleetCache, now_ns: int, now_unix_ns: int) -> None:
        self._live = live
        self._fleet = fleet
        self._now_ns = now_ns
        self._now_unix_ns = now_unix_ns

    @functools.cached_property
    def cluster(self) -> Cluster:
        return self._live.refreshed(self._now_ns, self._now_unix_ns)

    @functools.cached_property
    def others(self) -> FleetMeasures:
        return self._fleet.of(self._live.view, self._now_ns)

    def reserve(self, plan: Plan, orders: list[WorkerOrder], request: PlanRequest) -> None:
        """Enters orders into the cluster, for the next decision of the same step. After it the nodes are derived anew,
        from the orders that were written."""
        reserve(self.cluster, plan, orders, request, self._now_ns)
        for stage in plan.stages:
            self._live.changed(stage.node)
            for share in stage.peers:
                self._live.changed(share.node)
