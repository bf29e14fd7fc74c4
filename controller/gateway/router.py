"""The versions that this gateway has calls for: found by the name in the URL, kept up to date, told to the schedulers.

A route is opened when a version is first called and forgotten when nobody needs it any more. Calls whose worker will
never come are told so (`prospects`). Who may come in is for `doorkeeper`, what becomes of a call for `invoke`.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Iterator

from fleetstart.runtime.contract.errors import NotFound, Unavailable
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerStatus
from fleetstart.runtime.contract.node.reports import GatewayReport

from ..http.invoke_url import Target
from ..scheduler.worker_pool import broken
from ..state.records import FunctionRecord, VersionKey, VersionRecord
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.traffic import version_for_call
from .admission.feasibility import Prospects
from .admission.wait_predictor import Waits
from .dispatch.backend import Route

LAST_WORDS_S = 1.0
"""How long to wait for the node to tell why a worker died."""


class RouteTable:
    def __init__(self, gateway: str, state: StateSync, prospects: Prospects, waits: Waits) -> None:
        self._gateway = gateway
        self._state = state
        self._view = state.view
        self._prospects = prospects
        self._waits = waits
        self._routes: dict[VersionKey, Route] = {}
        self._obituaries: dict[WorkerId, list[asyncio.Future[WorkerStatus]]] = {}
        self._view.on_worker(self._heard)
        self._view.on_change(self.check_waiting)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    # ── by name ────────────────────────────────────────────────────────────────────────────────────

    async def find(self, target: Target, request_id: str) -> Route:
        """Errors: NotFound, with what there is; Unavailable if nobody can tell."""
        record = self._view.functions.get(target.name)
        if record is None:
            record = await self._ask(target.name)
        number = target.version
        if number is None:
            number = version_for_call(
                record, target.alias, request_id, lambda version: self._is_broken(target.name, version)
            )
        key = VersionKey(target.name, number)
        route = self._routes.get(key)
        if route is not None:
            return route
        try:
            version = await self._state.version(key)
        except REDIS_ERRORS as error:
            raise Unavailable(f"{key} is not known here and Redis is away", retry_after_s=1) from error
        if version is None:
            raise NotFound(
                f"function {key.name} has no version {key.version}", hint=f"version {record.live} is its live one"
            )
        return self.open(key, version)

    def open(self, key: VersionKey, version: VersionRecord) -> Route:
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(
                key,
                version,
                elsewhere=lambda worker: self._view.running_elsewhere(worker, key, self._gateway),
                later=asyncio.get_running_loop().call_later,
            )
            for status in list(self._view.statuses.values()):
                if status.function == key.name and status.version == key.version:
                    route.heard(status, 0)  # ready before anybody called here: hot
        return route

    def _is_broken(self, name: FunctionName, version: Version) -> bool:
        """Whether its starts are given up, and no worker is left from before."""
        key = VersionKey(name, version)
        route = self._routes.get(key)
        failure = self._view.failures.get(key)
        return not (route and route.workers) and broken(failure, time.time_ns() // 1_000_000)

    async def _ask(self, name: FunctionName) -> FunctionRecord:
        """A name that the view does not have: deployed a moment ago, or never."""
        if len(name) <= 63:
            try:
                record = await self._state.function(name)
            except REDIS_ERRORS as error:
                raise Unavailable(f"function {name} is not known here and Redis is away", retry_after_s=1) from error
            if record is not None:
                return record
        near = difflib.get_close_matches(name[:63], self._view.functions, n=1)
        hint = f"did you mean {near[0]}?" if near else "`fs ls` lists what there is"
        raise NotFound(f"function {name[:80]} does not exist", hint=hint)

    # ── news ───────────────────────────────────────────────────────────────────────────────────────

    def _heard(self, status: WorkerStatus) -> None:
        key = VersionKey(status.function, status.version)
        now_ns = time.monotonic_ns()
        route = self._routes.get(key)
        if route is not None:
            route.heard(status, now_ns)
        if status.state in FINAL:
            for waiting in self._obituaries.pop(status.worker, []):
                if not waiting.done():
                    waiting.set_result(status)

    def check_waiting(self) -> None:
        """Calls whose worker will not come are told so; routes that nobody needs any more are forgotten."""
        now_ns = time.monotonic_ns()
        for key, route in list(self._routes.items()):
            if route.queue:
                route.pump(now_ns)  # another gateway's call may have ended
            if route.queue:
                now_unix_ns = time.time_ns()
                self._waits.look(route, now_ns, now_unix_ns)  # how its weights come in shows from one look to the next
                ended = self._prospects.hopeless(route, now_ns, now_unix_ns // 1_000_000)
                if ended is not None:
                    route.fail(*ended)
            elif route.idle and not route.workers:
                record = self._view.functions.get(key.name)
                if record is None or record.live != key.version:
                    del self._routes[key]
                    self._waits.forget(key)

    async def final_status(self, worker: WorkerId) -> WorkerStatus | None:
        """What its node says of its end, if it says so soon."""
        known = self._view.ended.get(worker)
        if known is not None:
            return known
        waiting: asyncio.Future[WorkerStatus] = asyncio.get_running_loop().create_future()
        self._obituaries.setdefault(worker, []).append(waiting)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                return await waiting
        except TimeoutError:
            return None

    # ── what the schedulers hear ───────────────────────────────────────────────────────────────────

    def report(self) -> GatewayReport:
        """What waits and runs here; also what did since the last published report (see `Route.peak`)."""
        loads = {}
        for key, route in self._routes.items():
            load = route.load()
            if load.queued or load.running:
                loads[str(key)] = load
        return GatewayReport(gateway=self._gateway, loads=loads)

    def published(self) -> None:
        for route in self._routes.values():
            route.peak = 0
