"""Tries new versions before calls go to them: a worker must start, and answer where its readiness can be asked for.

The scheduler starts that worker because the function's record names the version (`FunctionRecord.rollout`), so a
trial outlives whichever controller began it. What comes of it is decided by `decide`, from what the view says; the
shell below asks workers and writes records, in the controller that schedules.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

import aiohttp
from yarl import URL

from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, StartFailed
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import WorkerId, new_invocation_id
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.worker_headers import CONTINUE_HEADER, DEADLINE_HEADER, REQUEST_HEADER, TOKEN_HEADER

from ..http.client import open_session
from ..scheduler.loop import Scheduler
from ..scheduler.planning import UNPLACED_NS
from ..scheduler.worker_pool import broken
from ..state import traffic as versions
from ..state.records import Failure, FunctionRecord, Rollout, VersionKey, VersionRecord
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.view import View
from .registry import Registry

log = logging.getLogger(__name__)

TICK_S = 1.0
ASK_AGAIN_S = 0.25
PROBE_S = 10.0
"""How long a worker may take to answer one probe."""
SLACK_MS = 10_000
"""On top of `start_timeout_s`: a node that is late says so itself, and knows more about it."""
LLM_PROBE = "/v1/models"
ANSWER_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDecision:
    action: Literal["wait", "ask", "promote", "reject"]
    error: ErrorInfo | None = None
    """Why it is rejected."""


def decide(
    rollout: Rollout,
    spec: FunctionSpec,
    *,
    ready: bool,
    problem: str | None,
    failure: Failure | None,
    homeless: ErrorInfo | None,
    now_unix_ms: int,
) -> RolloutDecision:
    """What becomes of a version that is being tried.

    `ready`: it has a worker that could be called. `problem`: what was wrong with its answer to the probe, "" if
    nothing was, None if it was not asked. `homeless`: why no node will take it.
    """
    if ready:
        if not probe_path(spec) or problem == "":
            return RolloutDecision(action="promote")
        if now_unix_ms < _ends_unix_ms(rollout, spec):
            return RolloutDecision(action="ask")
        return RolloutDecision(action="reject", error=_never_well(spec, problem))
    if failure is not None and broken(failure, now_unix_ms):
        return RolloutDecision(action="reject", error=failure.error)
    if homeless is not None:
        return RolloutDecision(action="reject", error=homeless)
    if now_unix_ms < _ends_unix_ms(rollout, spec):
        return RolloutDecision(action="wait")
    return RolloutDecision(action="reject", error=failure.error if failure is not None else _never_ready(spec))


def probe_path(spec: FunctionSpec) -> str:
    return spec.probe or (LLM_PROBE if spec.llm is not None else "")


def _ends_unix_ms(rollout: Rollout, spec: FunctionSpec) -> int:
    return rollout.begun_unix_ms + round(spec.start_timeout_s * 1000) + SLACK_MS


def _never_well(spec: FunctionSpec, problem: str | None) -> ErrorInfo:
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
    """The shell: one look a change of the view, or a second, in the controller that schedules."""

    def __init__(self, state: StateSync, registry: Registry, scheduler: Scheduler) -> None:
        self._view: View = state.view
        self._registry = registry
        self._scheduler = scheduler
        self._wake = asyncio.Event()
        self._homeless_since_ns: dict[VersionKey, int] = {}
        self._problems: dict[WorkerId, str] = {}
        """What was wrong with each worker's answer, "" for nothing."""
        state.view.on_change(self._wake.set)

    async def run(self) -> None:
        async with open_session() as session:
            while True:
                asked = False
                self._wake.clear()
                if self._scheduler.fence and self._view.redis == "ok":
                    with contextlib.suppress(*REDIS_ERRORS):
                        asked = await self._look(session)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ASK_AGAIN_S if asked else TICK_S):
                        await self._wake.wait()

    async def _look(self, session: aiohttp.ClientSession) -> bool:
        """Whether some worker is to be asked again."""
        tried = [record for record in self._view.functions.values() if record.rollout is not None]
        if not tried:
            self._homeless_since_ns.clear()
            self._problems.clear()
            return False
        return any(await asyncio.gather(*(self._one(record, session) for record in tried)))

    async def _one(self, record: FunctionRecord, session: aiohttp.ClientSession) -> bool:
        rollout = record.rollout
        assert rollout is not None
        key = VersionKey(record.name, rollout.version)
        version = self._view.versions.get(key)
        if version is None:
            return False
        worker = self._ready(key)
        decided = self._verdict(rollout, key, version, worker)
        if decided.action == "ask" and worker is not None:
            self._problems[worker.worker] = await _ask(session, worker, probe_path(version.spec))
            decided = self._verdict(rollout, key, version, worker)
        if decided.action in ("promote", "reject"):
            await self._end(key, rollout, decided.error)
        return decided.action == "ask"

    def _verdict(
        self, rollout: Rollout, key: VersionKey, version: VersionRecord, worker: WorkerStatus | None
    ) -> RolloutDecision:
        return decide(
            rollout,
            version.spec,
            ready=worker is not None,
            problem=self._problems.get(worker.worker) if worker is not None else None,
            failure=self._view.failures.get(key),
            homeless=self._homeless(key),
            now_unix_ms=time.time_ns() // 1_000_000,
        )

    def _ready(self, key: VersionKey) -> WorkerStatus | None:
        for status in self._view.statuses.values():
            if VersionKey(status.function, status.version) == key and status.state == "ready" and status.endpoint:
                return status
        return None

    def _homeless(self, key: VersionKey) -> ErrorInfo | None:
        """Once there was no room for as long as calls would wait for it."""
        reason = self._scheduler.unplaced.get(key)
        if reason is None:
            self._homeless_since_ns.pop(key, None)
            return None
        now_ns = time.monotonic_ns()
        return reason if now_ns - self._homeless_since_ns.setdefault(key, now_ns) > UNPLACED_NS else None

    async def _end(self, key: VersionKey, rollout: Rollout, error: ErrorInfo | None) -> None:
        """Unless somebody has ended it, or begun another one, meanwhile."""
        now_unix_ms = time.time_ns() // 1_000_000

        def change(record: FunctionRecord) -> FunctionRecord:
            if record.rollout != rollout:
                return record
            if error is not None:
                return versions.rejected(record, error, now_unix_ms)
            return versions.promoted(record, now_unix_ms)

        try:
            await self._registry.change(key.name, change)
        except FleetError as gone:
            log.info("a trial has no function any more", extra={"function": str(key), "error": gone.message})
            return
        what = "a new version gets its calls" if error is None else "a new version was rejected"
        log.info(what, extra={"function": str(key), "error": error.message if error is not None else ""})


async def _ask(session: aiohttp.ClientSession, worker: WorkerStatus, path: str) -> str:
    headers = {
        TOKEN_HEADER: worker.token,
        REQUEST_HEADER: new_invocation_id(),
        DEADLINE_HEADER: str(round(PROBE_S * 1000)),
        CONTINUE_HEADER: "0",
    }
    url = URL(f"http://{worker.endpoint}{path}", encoded=True)
    try:
        async with (
            asyncio.timeout(PROBE_S),
            session.get(url, headers=headers, allow_redirects=False) as response,
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
