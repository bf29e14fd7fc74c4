"""Routes calls to versions: finds the backend of the name in the URL, keeps backends up to date, reports their load.

A backend is opened when a version is first called, and forgotten when it has neither calls nor workers. Waiting calls
that will get no worker are failed (`admission.feasibility`).
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Iterator

from fleetstart.runtime.contract.errors import NotFound, Unavailable
from fleetstart.runtime.contract.function.names import FULL_NAME_MAX
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerStatus
from fleetstart.runtime.contract.node.reports import GatewayReport

from ..http.invoke_url import Target
from ..scheduler.worker_pool import broken
from ..state.records import FunctionRecord, VersionKey, VersionRecord
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.traffic import version_for_call
from .admission.feasibility import FeasibilityCheck
from .admission.wait_predictor import WaitPredictor
from .dispatch.version_backend import VersionBackend

FINAL_STATUS_TIMEOUT_S = 3.0
"""Timeout for a dead worker's final status, with its cause, from the node. gVisor on a busy machine takes more than a
second to end; without the status, a call that never ran is not run again."""


class Router:
    def __init__(
        self, gateway: str, state: StateSync, feasibility: FeasibilityCheck, wait_predictor: WaitPredictor
    ) -> None:
        self._gateway = gateway
        self._state = state
        self._view = state.view
        self._feasibility = feasibility
        self._wait_predictor = wait_predictor
        self._backends: dict[VersionKey, VersionBackend] = {}
        self._final_status_waiters: dict[WorkerId, list[asyncio.Future[WorkerStatus]]] = {}
        self._view.on_worker(self._on_status)
        self._view.on_change(self.check_waiting)

    def __iter__(self) -> Iterator[VersionBackend]:
        return iter(self._backends.values())

    # ── by name ────────────────────────────────────────────────────────────────────────────────────

    async def find(self, target: Target, request_id: str, *, accepted: Version | None = None) -> VersionBackend:
        """Finds the backend of a call's version. `accepted`: the one to which a stored call would have gone when it was
        accepted, if that is known. Errors: NotFound; Unavailable while Redis is away."""
        record = self._view.functions.get(target.name)
        if record is None:
            record = await self._read_function(target.name)
        if accepted is not None and accepted < record.first:  # its data is not for who has the name now
            raise NotFound(
                f"the function {target.name} that this call was for was removed, and another one has its name",
                hint=f"send it to version {record.live} as a new call if it is for that one",
            )
        number = target.version
        if number is None:
            number = version_for_call(
                record, target.alias, request_id, lambda version: self._is_broken(target.name, version)
            )
        key = VersionKey(target.name, number)
        backend = self._backends.get(key)
        if backend is not None and number >= record.first:
            known = self._view.versions.get(key)
            if known is None or known is backend.record or known == backend.record:
                return backend
            del self._backends[key]  # Redis lost the version with its last writes, and gave its number again
        try:
            version = await self._state.version(key)
        except REDIS_ERRORS as error:
            raise Unavailable(f"{key} is not known here and Redis is away", retry_after_s=1) from error
        if version is None:
            raise NotFound(
                f"function {key.name} has no version {key.version}", hint=f"version {record.live} is its live one"
            )
        return self.open(key, version)

    def open(self, key: VersionKey, version: VersionRecord) -> VersionBackend:
        backend = self._backends.get(key)
        if backend is None:
            backend = self._backends[key] = VersionBackend(
                key,
                version,
                elsewhere=lambda worker: self._view.running_elsewhere(worker, key, self._gateway),
                later=asyncio.get_running_loop().call_later,
            )
            for status in list(self._view.statuses_of(key.name).values()):
                if status.version == key.version:
                    backend.on_status(status, 0)  # ready before the first call here: hot
        return backend

    def _is_broken(self, name: FunctionName, version: Version) -> bool:
        """A version is broken if its starts are given up and no worker is left."""
        key = VersionKey(name, version)
        backend = self._backends.get(key)
        failure = self._view.failures.get(key)
        return not (backend and backend.workers) and broken(failure, time.time_ns() // 1_000_000)

    async def _read_function(self, name: FunctionName) -> FunctionRecord:
        """Reads a function from Redis that the view lacks: deployed a moment ago, or never."""
        if len(name) <= FULL_NAME_MAX:
            try:
                record = await self._state.function(name)
            except REDIS_ERRORS as error:
                raise Unavailable(f"function {name} is not known here and Redis is away", retry_after_s=1) from error
            if record is not None:
                return record
        near = difflib.get_close_matches(name[:FULL_NAME_MAX], self._view.functions, n=1)
        hint = f"did you mean {near[0]}?" if near else "`fs ls` lists what there is"
        raise NotFound(f"function {name[:127]} does not exist", hint=hint)

    # ── changes of the view ───────────────────────────────────────────────────────────────────────────────────────

    def _on_status(self, status: WorkerStatus) -> None:
        key = VersionKey(status.function, status.version)
        now_ns = time.monotonic_ns()
        backend = self._backends.get(key)
        if backend is not None:
            backend.on_status(status, now_ns)
        if status.state in FINAL:
            for waiting in self._final_status_waiters.pop(status.worker, []):
                if not waiting.done():
                    waiting.set_result(status)

    def check_waiting(self) -> None:
        """Fails calls that will get no worker, and forgets backends without calls and workers."""
        now_ns = time.monotonic_ns()
        for key, backend in list(self._backends.items()):
            if backend.queue:
                backend.dispatch_waiting(now_ns)  # another gateway's call may have ended
            if backend.queue:
                now_unix_ns = time.time_ns()
                if backend.spec.weights is not None:  # measures how fast they come in
                    self._wait_predictor.pending_starts(backend, now_ns, now_unix_ns)
                ended = self._feasibility.unschedulable(backend, now_ns, now_unix_ns // 1_000_000)
                if ended is not None:
                    backend.fail_waiting(*ended)
            elif not backend.workers and not backend.open_calls:
                record = self._view.functions.get(key.name)
                if record is None or record.live != key.version:
                    del self._backends[key]
                    self._wait_predictor.forget(key)

    def status_of(self, name: FunctionName, worker: WorkerId) -> WorkerStatus | None:
        """The status of a function's worker that has an endpoint; None if none is known."""
        status = self._view.statuses_of(name).get(worker)
        return status if status is not None and status.endpoint and status.state not in FINAL else None

    async def final_status(self, worker: WorkerId) -> WorkerStatus | None:
        """The final status of a worker, from its node; None if it does not come soon."""
        known = self._view.ended.get(worker)
        if known is not None:
            return known
        waiting: asyncio.Future[WorkerStatus] = asyncio.get_running_loop().create_future()
        self._final_status_waiters.setdefault(worker, []).append(waiting)
        try:
            async with asyncio.timeout(FINAL_STATUS_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            return None
        finally:
            others = [other for other in self._final_status_waiters.get(worker, ()) if other is not waiting]
            if others:
                self._final_status_waiters[worker] = others
            else:
                self._final_status_waiters.pop(worker, None)

    # ── reports ───────────────────────────────────────────────────────────────────

    def report(self) -> GatewayReport:
        """Load of all versions: calls that wait or run, or did since the last published report."""
        loads, now_ns = {}, time.monotonic_ns()
        for key, backend in self._backends.items():
            if backend.quiet:
                continue
            load = backend.load(now_ns)
            if load.queued or load.running:
                loads[str(key)] = load
        return GatewayReport(gateway=self._gateway, loads=loads)

    def published(self) -> None:
        for backend in self._backends.values():
            backend.peak = 0
