"""Predicts the wait for a slot of each version: gathers the inputs of `wait_model` from backends and the view.

Keeps the rates at which segments fill. A prediction of starts is cached for a moment, so that a thousand rejections
compute it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.wait_estimate import PendingStart, WaitEstimate

from ...planner.checkpoint_layout import CheckpointLayout
from ...planner.estimates import NodeMeasures, VersionMeasures
from ...planner.node_state import NodeState
from ...planner.order_state import OrderState, pending_bytes
from ...scheduler.start_orders import layout_in, measures_of, plan_start, request_of
from ...state.records import VersionKey
from ...state.view import View
from ..dispatch.version_backend import VersionBackend
from .feasibility import FeasibilityCheck
from .wait_model import (
    UNKNOWN_S,
    FillRate,
    QueueState,
    possible_since_s,
    predicted_wait_s,
    remaining_fetch_s,
    remaining_start_s,
)

PENDING_STARTS_KEPT_NS = 100_000_000
FILL_RATES_KEPT = 256


class WaitPrediction(NamedTuple):
    wait: WaitEstimate
    sure: bool
    """It rests on measurements of this version, not on priors: only then are calls rejected for it."""
    workers: int
    """Workers that are ready or ordered."""


class _PredictedStart(NamedTuple):
    """A start that is under way, and how much its prediction rests on."""

    start: PendingStart
    measured: bool
    """The rate of its weights was measured, not taken from the planner."""
    steady: bool
    """No stall is among the reports of that rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingStarts:
    at_ns: int
    coming: tuple[PendingStart, ...]
    ordered: int
    """Pending starts that are ordered already; the others are what the planner would order."""
    sure: bool


class WaitPredictor:
    """Predicts waits at one gateway."""

    def __init__(self, gateway: str, view: View, feasibility: FeasibilityCheck) -> None:
        self._gateway = gateway
        self._view = view
        self._feasibility = feasibility
        self._layouts: dict[CheckpointId, CheckpointLayout] = {}
        self._starts: dict[VersionKey, _PendingStarts] = {}
        self._arrivals: dict[tuple[NodeId, CheckpointId], FillRate] = {}

    def predict(self, backend: VersionBackend, now_ns: int, now_unix_ns: int) -> WaitPrediction:
        """Predicts the wait of a call that comes now and finds no free slot."""
        starts = self.pending_starts(backend, now_ns, now_unix_ns)
        passed_s = (now_ns - starts.at_ns) / 1e9
        coming = [msgspec.structs.replace(one, ready_s=max(0.0, one.ready_s - passed_s)) for one in starts.coming]
        running, elapsed_s = backend.slots_in_use(now_ns)
        measures = measures_of(self._view, backend.key, backend.record)
        call_s = backend.service_time.mean_s if backend.service_time.seen else measures.call_s.value
        queued = len(backend.queue) + self._queued_elsewhere(backend.key)
        running = min(running, backend.slots)
        line = QueueState(
            queued=queued, slots=backend.slots, running=running, elapsed_s=elapsed_s, call_s=call_s, coming=coming
        )
        wait = WaitEstimate(
            seconds=predicted_wait_s(line),
            queued=queued,
            slots=line.slots,
            running=running,
            call_s=call_s,
            coming=coming,
        )
        measured = bool(backend.service_time.seen or measures.call_s.count)
        waits_for_calls = bool(line.slots) or queued >= sum(one.slots for one in coming)
        sure = (measured or not waits_for_calls) and (starts.sure or bool(line.slots)) and wait.seconds < UNKNOWN_S
        return WaitPrediction(wait, sure, len(backend.workers) + starts.ordered)

    def pending_starts(self, backend: VersionBackend, now_ns: int, now_unix_ns: int) -> _PendingStarts:
        """The pending starts, from the cache while they are fresh."""
        known = self._starts.get(backend.key)
        if known is None or now_ns - known.at_ns > PENDING_STARTS_KEPT_NS:
            known = self._starts[backend.key] = self._compute_starts(backend, now_ns, now_unix_ns)
        return known

    def forget(self, key: VersionKey) -> None:
        self._starts.pop(key, None)

    def _queued_elsewhere(self, key: VersionKey) -> int:
        if len(self._view.gateways) < 2:
            return 0
        reports = [report for name, (report, _) in self._view.gateways.items() if name != self._gateway]
        return sum(load.queued for report in reports if (load := report.loads.get(str(key))) is not None)

    # ── starts ─────────────────────────────────────────────────────────────────────────────────────

    def _compute_starts(self, backend: VersionBackend, now_ns: int, now_unix_ns: int) -> _PendingStarts:
        measures = measures_of(self._view, backend.key, backend.record)
        learned = bool(measures.library_s.count or measures.ttft_error.count)
        starts = self._under_way(backend, now_ns)
        states = self._feasibility.nodes(now_ns, now_unix_ns // 1_000_000)
        if not starts:
            coming = () if backend.workers else self._planned(backend, now_ns, now_unix_ns)
            return _PendingStarts(at_ns=now_ns, coming=coming, ordered=0, sure=learned)
        by_node = {state.node: state for state in states}
        found = [self._coming(backend, stages, by_node, measures, now_unix_ns) for stages in starts]
        sure = all(one.steady and (learned or one.measured) for one in found)
        coming = tuple(one.start for one in found)
        return _PendingStarts(at_ns=now_ns, coming=coming, ordered=len(found), sure=sure)

    def _under_way(self, backend: VersionBackend, now_ns: int) -> list[list[OrderState]]:
        """Orders of each pending start: one worker's, or those of all stages of a pipeline."""
        view, groups = self._view, defaultdict[str, list[OrderState]](list)
        layout = layout_in(self._layouts, backend.record)
        for order in view.orders_of(backend.key).values():
            if (
                order.wanted != "run"
                or order.worker in backend.workers
                or view.worker_lost(order.worker, order.node, order.epoch, now_ns)
            ):
                continue
            seen = OrderState(order=order, status=view.statuses.get(order.worker), layout=layout)
            if seen.starting:
                groups[order.stage.pipeline if order.stage is not None else order.worker].append(seen)
        return list(groups.values())

    def _coming(
        self,
        backend: VersionBackend,
        stages: Sequence[OrderState],
        states: dict[NodeId, NodeState],
        measures: VersionMeasures,
        now_unix_ns: int,
    ) -> _PredictedStart:
        """Predicts one start, which is ready when its last stage is."""
        slowest = _PredictedStart(PendingStart(ready_s=-1.0), measured=False, steady=True)
        for seen in stages:
            order, state = seen.order, states.get(seen.order.node)
            segment = self._segment(order)
            pending, rate, fetch_s = pending_bytes(seen, segment) if order.spec.weights else 0, 0.0, 0.0
            arrival = self._arrival(order, segment)
            observed = arrival.bytes_per_s if arrival is not None else None
            if pending:
                rate = observed or _link_share(state)
                counted_unix_ns = segment.counted_unix_ns if segment is not None else 0
                since_s = (now_unix_ns - (counted_unix_ns or now_unix_ns)) / 1e9
                fetch_s = remaining_fetch_s(pending, rate, since_s)
            own_s = (state.start_s if state is not None else 0.0) + measures.library_s.value
            since_s = (now_unix_ns - (order.decided_unix_ns or order.ordered_unix_ns)) / 1e9
            since_s = possible_since_s(since_s, order.spec.start_timeout_s)
            left_s = remaining_start_s(own_s=own_s, since_s=since_s, fetch_s=fetch_s)
            if left_s > slowest.start.ready_s:
                size_bytes = seen.size_bytes if order.spec.weights else 0
                start = PendingStart(
                    ready_s=left_s,
                    slots=backend.spec.concurrency,
                    fetched_bytes=max(0, size_bytes - pending),
                    weight_bytes=size_bytes,
                    bytes_per_s=rate,
                )
                steady = not pending or arrival is None or arrival.steady
                slowest = _PredictedStart(start, measured=bool(pending and observed), steady=steady)
        ready_s = slowest.start.ready_s + measures.rest_s.value
        return slowest._replace(start=msgspec.structs.replace(slowest.start, ready_s=ready_s))

    def _segment(self, order: WorkerOrder) -> SegmentReport | None:
        node = self._view.nodes.get(order.node)
        if node is None or order.spec.weights is None:
            return None
        for segment in node.report.segments:
            if segment.checkpoint == order.spec.weights and segment.state != "failed":
                return segment
        return None

    def _arrival(self, order: WorkerOrder, segment: SegmentReport | None) -> FillRate | None:
        """Rate at which an order's segment fills, with its newest report noted; None once it is full."""
        if segment is None or not segment.counted_unix_ns:
            return None
        key = (order.node, segment.checkpoint)
        arrival = self._arrivals.get(key)
        if arrival is None:
            while len(self._arrivals) >= FILL_RATES_KEPT:
                del self._arrivals[next(iter(self._arrivals))]
            arrival = self._arrivals[key] = FillRate()
        arrival.note(segment.counted_unix_ns, segment.ready_bytes)
        return arrival

    def _planned(self, backend: VersionBackend, now_ns: int, now_unix_ns: int) -> tuple[PendingStart, ...]:
        """The start that the planner would order now."""
        request = request_of(self._view, backend.key, backend.record, 1)
        plan = plan_start(request, self._feasibility.cluster(now_ns, now_unix_ns), now_ns / 1e9)
        if plan.error is not None and not plan.wait_s:
            return ()
        ready_s = plan.ready_s if plan.error is None else plan.wait_s
        return (PendingStart(ready_s=ready_s + request.measures.rest_s.value, slots=backend.spec.concurrency),)


def _link_share(state: NodeState | None) -> float:
    """Expected rate before a measurement: a fetch's share of its node's link, as the planner has it."""
    if state is None:
        return NodeMeasures().store_bytes_per_s.value
    return state.link.bytes_per_s / max(1, len(state.link.fetches))
