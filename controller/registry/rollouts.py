"""Rollouts: a new version gets calls once one of its workers has started and passed its readiness probe.

The scheduler starts that worker because the function's record names the version (`FunctionRecord.rollout`), so a
rollout survives the controller that began it. `decide` promotes or rejects, a pure function of the view;
`RolloutController` probes workers and writes records, in the controller that schedules.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

import aiohttp

from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, NotFound, StartFailed
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName, WorkerId, new_invocation_id
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.process.tasks import wait_at_most
from fleetstart.runtime.contract.worker_headers import (
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    REQUEST_HEADER,
    ROOT_PATH_HEADER,
    TOKEN_HEADER,
)

from ..gateway.node_links import NodeLinks
from ..http.client import open_session
from ..scheduler.loop import Scheduler
from ..scheduler.start_orders import UNPLACED_NS
from ..scheduler.worker_pool import broken
from ..state import traffic
from ..state.records import Failure, FunctionRecord, Rollout, VersionKey, VersionRecord
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.view import View
from .registry import Registry

log = logging.getLogger(__name__)

TICK_S = 1.0
PROBE_EVERY_S = 0.25
PROBE_S = 10.0
"""Timeout of one probe."""
SLACK_MS = 10_000
"""Added to `start_timeout_s`: a node reports a late start itself, with a better error."""
LLM_PROBE = "/v1/models"
ANSWER_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDecision:
    """The next step of a rollout."""

    action: Literal["wait", "probe", "promote", "reject"]
    error: ErrorInfo | None = None
    """Reason of a rejection."""


def decide(
    rollout: Rollout,
    spec: FunctionSpec,
    *,
    ready: bool,
    problem: str | None,
    failure: Failure | None,
    unplaced: ErrorInfo | None,
    now_unix_ms: int,
) -> RolloutDecision:
    """Decides whether the rollout waits, probes, promotes the version or rejects it.

    `ready`: the version has a ready worker. `problem`: result of its last probe, "" if it passed, None if there was
    none. `unplaced`: why no node can take a worker.
    """
    if ready:
        if not probe_path(spec) or problem == "":
            return RolloutDecision(action="promote")
        if now_unix_ms < _ends_unix_ms(rollout, spec):
            return RolloutDecision(action="probe")
        return RolloutDecision(action="reject", error=_never_healthy(spec, problem))
    if failure is not None and broken(failure, now_unix_ms):
        return RolloutDecision(action="reject", error=failure.error)
    if unplaced is not None:
        return RolloutDecision(action="reject", error=unplaced)
    if now_unix_ms < _ends_unix_ms(rollout, spec):
        return RolloutDecision(action="wait")
    return RolloutDecision(action="reject", error=failure.error if failure is not None else _never_ready(spec))


def probe_path(spec: FunctionSpec) -> str:
    return spec.probe or (LLM_PROBE if spec.llm is not None else "")


def _ends_unix_ms(rollout: Rollout, spec: FunctionSpec) -> int:
    return rollout.begun_unix_ms + round(spec.start_timeout_s * 1000) + SLACK_MS


def _never_healthy(spec: FunctionSpec, problem: str | None) -> ErrorInfo:
    return StartFailed(
        f"function {spec.name}: its worker started, but GET {probe_path(spec)} {problem or 'was not answered'}",
        hint=f"it must answer 2xx within start_timeout, {spec.start_timeout_s:g} s; `fs logs {spec.name}` may say more",
    ).info()


def _never_ready(spec: FunctionSpec) -> ErrorInfo:
    return StartFailed(
        f"function {spec.name}: no worker was ready within start_timeout, {spec.start_timeout_s:g} s",
        hint=f"raise start_timeout, or look into `fs logs {spec.name}`",
    ).info()


class RolloutController:
    """Carries rollouts out in the controller that schedules: a round for each change of the view, and each second."""

    def __init__(self, state: StateSync, registry: Registry, scheduler: Scheduler, links: NodeLinks) -> None:
        self._links = links
        self._view: View = state.view
        self._registry = registry
        self._scheduler = scheduler
        self._wake = asyncio.Event()
        self._unplaced_since_ns: dict[VersionKey, int] = {}
        self._problems: dict[WorkerId, str] = {}
        """Result of each worker's last probe, "" if it passed."""
        self._changes = state.view.follow()
        self._changes.functions.update(state.view.functions)
        self._trying: set[FunctionName] = set()
        """Functions with a rollout."""
        state.view.on_change(self._wake.set)

    async def run(self) -> None:
        async with open_session() as session:
            while True:
                probed = False
                self._wake.clear()
                if self._scheduler.fence and self._view.redis == "ok":
                    with contextlib.suppress(*REDIS_ERRORS):
                        probed = await self._round(session)
                await wait_at_most(self._wake, PROBE_EVERY_S if probed else TICK_S)

    async def _round(self, session: aiohttp.ClientSession) -> bool:
        """One round over all rollouts. Returns whether a worker must be probed again soon."""
        for name in self._changes.take_functions():
            record = self._view.functions.get(name)
            if record is None or record.rollout is None:
                self._trying.discard(name)
            else:
                self._trying.add(name)
            if record is not None:
                await self._note_start(record)
        tried = [record for name in self._trying if (record := self._view.functions.get(name)) is not None]
        if not tried:
            self._unplaced_since_ns.clear()
            self._problems.clear()
            return False
        return any(await asyncio.gather(*(self._step(record, session) for record in tried)))

    async def _note_start(self, record: FunctionRecord) -> None:
        """Notes that the live version has started: the first time, and after a failure."""
        failed = record.rejected is not None and record.rejected.version == record.live
        if record.rollout is not None or (record.started == record.live and not failed):
            return
        worker = self._ready(VersionKey(record.name, record.live))
        if worker is None:
            return
        live, ready_unix_ms = record.live, worker.changed_unix_ns // 1_000_000
        if traffic.with_start(record, ready_unix_ms) == record:
            return

        def change(now: FunctionRecord) -> FunctionRecord:
            return traffic.with_start(now, ready_unix_ms) if now.live == live else now

        with contextlib.suppress(FleetError):  # removed meanwhile
            await self._registry.change(record.name, change)

    async def _step(self, record: FunctionRecord, session: aiohttp.ClientSession) -> bool:
        rollout = record.rollout
        assert rollout is not None
        key = VersionKey(record.name, rollout.version)
        version = self._view.versions.get(key)
        if version is None:
            return False
        worker = self._ready(key)
        decided = self._decide(rollout, key, version, worker)
        if decided.action == "probe" and worker is not None:
            self._problems[worker.worker] = await _probe(session, self._links, worker, probe_path(version.spec))
            decided = self._decide(rollout, key, version, worker)
        if decided.action in ("promote", "reject"):
            await self._end(key, rollout, decided.error)
        return decided.action == "probe"

    def _decide(
        self, rollout: Rollout, key: VersionKey, version: VersionRecord, worker: WorkerStatus | None
    ) -> RolloutDecision:
        return decide(
            rollout,
            version.spec,
            ready=worker is not None,
            problem=self._problems.get(worker.worker) if worker is not None else None,
            failure=self._view.failures.get(key),
            unplaced=self._unplaced_reason(key),
            now_unix_ms=time.time_ns() // 1_000_000,
        )

    def _ready(self, key: VersionKey) -> WorkerStatus | None:
        for status in self._view.statuses_of(key.name).values():
            if status.version == key.version and status.state == "ready" and status.endpoint:
                return status
        return None

    def _unplaced_reason(self, key: VersionKey) -> ErrorInfo | None:
        """The reason, once the version was unplaced for as long as calls would wait."""
        reason = self._scheduler.unplaced.get(key)
        if reason is None:
            self._unplaced_since_ns.pop(key, None)
            return None
        now_ns = time.monotonic_ns()
        return reason if now_ns - self._unplaced_since_ns.setdefault(key, now_ns) > UNPLACED_NS else None

    async def _end(self, key: VersionKey, rollout: Rollout, error: ErrorInfo | None) -> None:
        """Ends the rollout, unless it was ended or replaced meanwhile. What fails is tried again in the next round."""
        now_unix_ms = time.time_ns() // 1_000_000

        def change(record: FunctionRecord) -> FunctionRecord:
            return traffic.ended(record, error, now_unix_ms) if record.rollout == rollout else record

        try:
            record = await self._registry.change(key.name, change)
        except NotFound as gone:
            log.info("a rollout's function was removed", extra={"function": str(key), "error": gone.message})
            return
        except FleetError as failed:
            log.warning("a rollout could not be ended yet", extra={"function": str(key), "error": failed.message})
            return
        rejection = record.rejected if record.rejected is not None and record.rejected.version == key.version else None
        what = "a new version was promoted" if rejection is None else "a new version was rejected"
        log.info(what, extra={"function": str(key), "error": rejection.error.message if rejection is not None else ""})


async def _probe(session: aiohttp.ClientSession, links: NodeLinks, worker: WorkerStatus, path: str) -> str:
    headers = {
        TOKEN_HEADER: worker.token,
        REQUEST_HEADER: new_invocation_id(),
        DEADLINE_HEADER: str(round(PROBE_S * 1000)),
        CONTINUE_HEADER: "0",
        ROOT_PATH_HEADER: f"/fn/{worker.function}",
    }
    try:
        url, tls = links.target(worker, path)
        async with (
            asyncio.timeout(PROBE_S),
            session.get(url, headers=headers, allow_redirects=False, **tls) as response,
        ):
            body = b""
            async for piece in response.content.iter_chunked(ANSWER_SHOWN):  # to its end: half an answer is none
                body = body or piece
            if response.status < 300:
                return ""
            return f"answered {response.status}: {body.decode(errors='replace')}"
    except TimeoutError:
        return f"was not answered within {PROBE_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"was not answered: {error}"
