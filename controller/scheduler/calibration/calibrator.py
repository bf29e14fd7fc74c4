"""Calibrates the planner in the scheduling controller: collects starts and answers, stores the estimates in Redis.

Nothing waits for it, and a lost observation costs one sample. Writes are fenced like the scheduler's, and an
observation that must count once has a mark in Redis, so that a new scheduler learns nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import DeviceOutOfMemory
from fleetstart.runtime.contract.ids import PipelineId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.process.tasks import wait_at_most
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from ...planner.estimates import NodeMeasures, VersionMeasures, node_prior, observe_device_shortage
from ...planner.plan import Plan
from ...state.records import StartOutcome, VersionKey, read_measures
from ...state.redis_client import REDIS_ERRORS, Script
from ...state.sync import StateSync
from ..leader import PLAN_KEPT_S
from ..start_orders import prior_of, stage_of
from .observations import (
    NOT_YET,
    SpeedTracker,
    StartSample,
    learn_outcome,
    learn_speed,
    learn_start,
    outdated,
    ready_s,
    sharers,
)

log = logging.getLogger(__name__)

Record = TypeVar("Record")

EVERY_S = 1.0
"""Interval of learning: that of the nodes' reports."""
PRUNE_EVERY = 60
"""Rounds."""
OUTCOMES_AT_ONCE = 100
STARTS_HELD = 1000
"""Starts held until their first answer has ended. A start without calls has none."""
LEARNED_KEPT_S = PLAN_KEPT_S + 3600
"""Expiry of the marks, later than the plan's: without a plan nothing is learned, so nothing is learned twice."""


class Calibrator:
    def __init__(self, state: StateSync, fence: Callable[[], int]) -> None:
        """`fence` is 0 while another controller schedules."""
        self._state = state
        self._view = state.view
        self._fence = fence
        self._script = Script(state.client, "save_estimates")
        self._ready: dict[WorkerId, WorkerStatus] = {}
        """Ready workers that may not have been learned from."""
        self._short: dict[VersionKey, int] = {}
        """Device memory that was too little for a version's workers, until it is learned."""
        self._speeds = SpeedTracker()
        self._led_with = 0
        self._readied: OrderedDict[WorkerId | PipelineId, StartSample] = OrderedDict()
        """Times to ready, until the start's outcome is known."""
        self._plans = RecordDecoder(Plan)
        self._outcomes = RecordDecoder(StartOutcome)
        self._node_reports = RecordDecoder(NodeReport)
        self._wake = asyncio.Event()
        state.view.on_worker(self._heard)

    def _heard(self, status: WorkerStatus) -> None:
        if status.state == "ready" and status.start != "standby" and self._fence():
            self._ready[status.worker] = status
            self._wake.set()
        order = self._view.orders.get(status.worker)  # deleted soon after the worker has failed
        if status.error is not None and status.error.code == DeviceOutOfMemory.code and order and self._fence():
            key = VersionKey(status.function, status.version)
            had_bytes = sum(share.memory_bytes for share in order.devices)
            self._short[key] = max(had_bytes, self._short.get(key, 0))
            self._wake.set()

    async def run(self) -> None:
        rounds = 0
        while True:
            await wait_at_most(self._wake, EVERY_S)
            self._wake.clear()
            if not self._fence() or self._view.redis != "ok":
                continue
            try:
                await self._learn()
                rounds += 1
                if rounds % PRUNE_EVERY == 0:
                    await self.prune()
            except REDIS_ERRORS as error:
                log.debug("observations cannot be stored: redis is unavailable", extra={"error": str(error)})

    async def _learn(self) -> None:
        if self._led_with != self._fence():
            self._take_over()
        for worker, status in list(self._ready.items()):
            await self.learn_start(status)
            self._ready.pop(worker, None)
        for key, had_bytes in list(self._short.items()):
            if (version := self._version(key)) is not None:
                measures = observe_device_shortage(version, had_bytes)
                await self._keep(None, {keys.measures_of_version(*key): measures})
            self._short.pop(key, None)
        for key, speed in self._speeds.news(self._reports()):
            version = self._version(key)
            if version is not None:
                await self._keep(None, {keys.measures_of_version(*key): learn_speed(version, speed)})
        await self._learn_outcomes()

    def _take_over(self) -> None:
        """Takes over from another scheduler: its unfinished starts are in the view; calls before now it has learned
        from."""
        self._led_with = self._fence()
        self._speeds = SpeedTracker(self._reports())
        for status in self._view.statuses.values():
            if status.state == "ready" and status.start != "standby":
                self._ready.setdefault(status.worker, status)

    def _reports(self) -> Iterable[NodeReport]:
        return [seen.report for seen in self._view.nodes.values() if seen.absent_since_ns is None]

    async def learn_start(self, status: WorkerStatus) -> None:
        """Updates the estimates of a node and a version from a worker that got ready, once a worker."""
        order, key = self._view.orders.get(status.worker), VersionKey(status.function, status.version)
        version = self._version(key)
        if order is None or version is None:
            return
        async with self._state.client.pipeline(transaction=False) as pipe:
            pipe.get(keys.plan(status.worker))
            pipe.get(keys.node(status.node))
            raw_plan, raw_report = await pipe.execute()
        plan = self._decoded(self._plans, "plan", status.worker, raw_plan)
        stage = stage_of(plan, order) if plan is not None else None
        if plan is None or stage is None:
            return
        if order.stage is not None and status.whole:  # its start was learned from when it was ready
            if _stands_for_its_start(order):
                await self.note_whole(order, plan, status)
            return
        shared_by = sharers(self._view, order)
        self._note_ready(order, ready_s(status, version), shared_by)
        report = self._decoded(self._node_reports, "node", status.node, raw_report)
        node = self._view.node_measures.get(status.node) or node_prior(list(self._view.node_measures.values()))
        node, version = learn_start((node, version), status, order, stage, report, shared_by)
        measures: dict[str, NodeMeasures | VersionMeasures] = {
            keys.measures_of_node(status.node): node,
            keys.measures_of_version(*key): version,
        }
        await self._keep(keys.learned(status.worker, "start"), measures)

    async def _learn_outcomes(self) -> None:
        pop = cast(Awaitable[list[bytes] | None], self._state.client.lpop(keys.OUTCOMES, OUTCOMES_AT_ONCE))
        for raw in await pop or ():
            outcome = self._decoded(self._outcomes, "start outcome", keys.OUTCOMES, raw)
            if outcome is None:
                continue
            key = VersionKey(outcome.function, outcome.version)
            order, version = self._view.orders.get(outcome.worker), self._version(key)
            if version is None or order is None or not _stands_for_its_start(order):
                continue
            raw_plan = await self._state.client.get(keys.plan(outcome.worker))
            plan = self._decoded(self._plans, "plan", outcome.worker, raw_plan)
            if plan is not None:
                known = learn_outcome(version, plan, outcome, self._readied.pop(_start(order), None), order)
                measures = {keys.measures_of_version(*key): known}
                await self._keep(keys.learned(outcome.worker, "outcome"), measures)

    def _note_ready(self, order: WorkerOrder, took_s: float, shared_by: int) -> None:
        start = _start(order)
        self._readied[start] = self._readied.get(start, NOT_YET).with_stage(took_s, shared_by)
        if len(self._readied) > STARTS_HELD:
            self._readied.popitem(last=False)

    async def note_whole(self, order: WorkerOrder, plan: Plan, status: WorkerStatus) -> None:
        """Writes the time of consolidation into the plan of each worker of the start, so that its cost is known, and
        how running requests were taken over. `status`: the first one in which it is whole."""
        if plan.whole_unix_ms:
            return
        whole_unix_ms = status.changed_unix_ns // 1_000_000
        raw = msgspec.json.encode(msgspec.structs.replace(plan, whole_unix_ms=whole_unix_ms, switch=status.switch))
        async with self._state.client.pipeline(transaction=False) as pipe:
            for other in self._view.orders.values():
                if _start(other) == _start(order):
                    pipe.set(keys.plan(other.worker), raw, xx=True, keepttl=True)
            await pipe.execute()

    def _version(self, key: VersionKey) -> VersionMeasures | None:
        """A version's current estimates; None if this controller does not know the version."""
        known, record = self._view.version_measures.get(key), self._view.versions.get(key)
        if known is None and record is not None:
            return prior_of(self._view, record)
        return known

    def _decoded(self, decoder: RecordDecoder[Record], kind: str, name: str, raw: Any) -> Record | None:
        """The record; None if there is none, or it cannot be read: then nothing is learned from it."""
        try:
            return decoder.decode(raw) if raw else None
        except UnreadableRecord as error:
            self._view.unreadable.note(kind, name, error)
            return None

    async def _keep(self, once: str | None, measures: Mapping[str, NodeMeasures | VersionMeasures]) -> None:
        """Stores estimates in Redis, and in the view at once. `once` is the mark of an observation that must count
        once."""
        raw = {field.encode(): msgspec.json.encode(value) for field, value in measures.items()}
        if await self._write(once, raw):
            nodes, versions = read_measures(raw)
            self._view.node_measures.update(nodes)
            self._view.version_measures.update(versions)

    async def prune(self) -> None:
        """Removes the estimates of nodes and versions that no longer exist."""
        gone = outdated(self._view)
        if gone:
            await self._write(None, {field.encode(): b"" for field in gone})

    async def _write(self, once: str | None, fields: dict[bytes, bytes]) -> bool:
        script_keys = [keys.FENCE, keys.MEASURES, *([once] if once is not None else [])]
        args: list[str | bytes | int] = [self._fence(), LEARNED_KEPT_S]
        for field, value in fields.items():
            args += [field, value]
        return bool(await self._script(script_keys, args) == 1)


def _start(order: WorkerOrder) -> WorkerId | PipelineId:
    """The identity of a start, which its stages share."""
    return order.stage.pipeline if order.stage is not None else order.worker


def _stands_for_its_start(order: WorkerOrder) -> bool:
    """True if a worker's calls show its start's TTFT; not those of a consolidated helper, which come long after it."""
    return order.stage is None or order.stage.index == 0
