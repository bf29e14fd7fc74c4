"""Calibration of the planner: reads observations from statuses, plans and reports. Estimates in, estimates out. Pure.

`calibrator` collects the observations and stores the estimates; `planner.estimates` updates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.node.speed import Speed

from ...planner.error_margins import Kind
from ...planner.estimates import (
    NodeMeasures,
    Source,
    StartObservation,
    VersionMeasures,
    observe_generation,
    observe_outcome,
    observe_start_of_version,
    observe_start_on_node,
    start_observation,
)
from ...planner.plan import Plan, StagePlan
from ...state.records import StartOutcome, VersionKey, parse_version_key
from ...state.traffic import tracked_versions
from ...state.view import View

Measures = tuple[NodeMeasures, VersionMeasures]


def sharers(view: View, order: WorkerOrder) -> int:
    """Number of checkpoints that the node fetched at about the same time, the worker's own included."""
    others = {
        other.spec.weights
        for other in view.orders.values()
        if other.node == order.node and other.spec.weights not in (None, order.spec.weights) and _starts(view, other)
    }
    return 1 + len(others)


def _starts(view: View, order: WorkerOrder) -> bool:
    status = view.statuses.get(order.worker)
    return order.wanted == "run" and (status is None or (status.state == "starting" and status.start == "cold"))


def start_seen(
    status: WorkerStatus, stage: StagePlan, bytes_per_s: Mapping[str, float], sharers: int, *, alone: bool
) -> StartObservation:
    """The observation of a start that succeeded. The node's own bandwidth (`bytes_per_s`) is better than bytes by time,
    unless other fetches shared the link. `alone` is False for a stage, whose `load` also waits for the other stages.
    """
    source = _source(stage)
    seen = start_observation(
        status.timeline,
        warm=status.start == "warm",
        fetch_bytes=stage.missing_bytes if source is not None else 0,
        source=source or "store",
        sharers=sharers,
    )
    rate = bytes_per_s.get(seen.source, 0.0)
    if rate > 0 and sharers == 1 and seen.fetch_s is not None:
        seen = dataclasses.replace(seen, fetch_s=seen.fetch_bytes / rate)
    elif stage.files_bytes:
        seen = dataclasses.replace(seen, fetch_s=None)  # they came in the same time
    if stage.files_bytes:
        seen = dataclasses.replace(seen, start_s=None)  # the process waited for them
    return seen if alone else dataclasses.replace(seen, library_s=None)


def _source(stage: StagePlan) -> Source | None:
    """The source of the stage's bytes; None if they came from several, which measures none."""
    if stage.store_bytes == stage.missing_bytes:
        return "store"
    if stage.store_bytes:
        return None
    if not stage.peers:
        return "disk"
    return "peer" if stage.peer_bytes >= 0.99 * stage.missing_bytes else None


def learn_start(
    known: Measures, status: WorkerStatus, order: WorkerOrder, stage: StagePlan, report: NodeReport | None, sharers: int
) -> Measures:
    rates = report.bytes_per_s if report is not None else {}
    seen = start_seen(status, stage, rates, sharers, alone=order.stage is None)
    node, version = known
    return observe_start_on_node(node, seen), observe_start_of_version(version, seen)


def ready_s(status: WorkerStatus, version: VersionMeasures) -> float:
    """Duration of a start by the formula that it was planned with (eq. 5), from its own measured times."""
    seen = start_observation(status.timeline, warm=status.start == "warm")
    own_s = (seen.start_s or 0.0) + (seen.device_s or 0.0) + version.library_s.value
    return max(own_s, seen.fetch_s or 0.0)


class StartSample(NamedTuple):
    """The measured time to ready of a start, of its slowest stage."""

    took_s: float
    shared: bool
    """True if other starts shared one of its links."""

    def with_stage(self, took_s: float, sharers: int) -> StartSample:
        return StartSample(max(self.took_s, took_s), self.shared or sharers > 1)


NOT_YET = StartSample(took_s=0.0, shared=False)


def learn_outcome(
    version: VersionMeasures, plan: Plan, outcome: StartOutcome, readied: StartSample | None, order: WorkerOrder
) -> VersionMeasures:
    """Learns from a first answer. The times are by the clocks of two machines, and impossible ones are ignored: with a
    clock that is an hour off, calls would be refused because of a wait that nothing has."""
    observed_s = (outcome.first_byte_unix_ms - plan.decided_unix_ms) / 1000
    started_s = readied.took_s if readied is not None else order.spec.start_timeout_s
    if not 0 < observed_s <= started_s + order.spec.timeout_s or not plan.decided_unix_ms or not plan.stages:
        return version
    return observe_outcome(
        version,
        kind=_kind(plan),
        predicted_s=plan.ttft_s,
        observed_s=observed_s,
        hindsight_s=plan.ttft_s - plan.ready_s + readied.took_s if readied is not None else None,
        shared=readied is not None and readied.shared,
    )


def _kind(plan: Plan) -> Kind:
    if not any(stage.fetch_s for stage in plan.stages):
        return "warm"
    return "group" if len(plan.stages) > 1 else "alone"


def learn_speed(version: VersionMeasures, speed: Speed) -> VersionMeasures:
    """Learns from mean call latencies. What a pipeline takes beyond the whole model's time is spent on its hops."""
    return observe_generation(
        version,
        prefill_s=speed.prefill_s,
        decode_s=speed.decode_s,
        call_s=speed.call_s,
        stages=speed.stages,
        work=1.0,
        device_bytes_per_s=speed.device_bytes_per_s,
    )


class SpeedTracker:
    """Tracks the calls in node reports that were learned from: reports repeat latencies until there are new calls."""

    def __init__(self, reports: Iterable[NodeReport] = ()) -> None:
        """`reports`: already learned from, by another scheduler."""
        self._calls: dict[tuple[NodeId, str, str], int] = {}
        self.news(reports)

    def news(self, reports: Iterable[NodeReport]) -> list[tuple[VersionKey, Speed]]:
        """The latencies that include new calls. Forgets versions that no report has any more."""
        found: list[tuple[VersionKey, Speed]] = []
        calls: dict[tuple[NodeId, str, str], int] = {}
        for report in reports:
            for text, speed in report.speeds.items():
                version, seen = parse_version_key(text), (report.node, report.epoch, text)
                calls[seen] = speed.calls
                if version is not None and speed.calls > self._calls.get(seen, 0):
                    found.append((version, speed))
        self._calls = calls
        return found


def outdated(view: View) -> list[str]:
    """Fields of fs:measures that are no longer needed: of removed nodes, and of versions that are neither in service
    nor called nor ordered."""
    live = {
        VersionKey(record.name, version) for record in view.functions.values() for version in tracked_versions(record)
    }
    ordered = {VersionKey(order.spec.name, order.version) for order in view.orders.values()}
    called = {key for text in view.loads() if (key := parse_version_key(text)) is not None}
    gone = [keys.measures_of_node(node) for node in view.node_measures.keys() - view.nodes.keys()]
    gone += [keys.measures_of_version(*key) for key in view.version_measures.keys() - live - ordered - called]
    return sorted(gone)
