"""The management API under /api/v1, as `resources` describes it: thin handlers over registry, view and history.

What deals with the store alone is in `store_api`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import version as installed_version

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from fleetstart.controller.access.api import AccessApi
from fleetstart.controller.access.handling import about, caller_of
from fleetstart.controller.billing.api import BillingApi
from fleetstart.controller.checkpoints import Checkpoints
from fleetstart.controller.config import Config
from fleetstart.controller.description.document import document
from fleetstart.controller.explain import invocation_plan
from fleetstart.controller.forecast import Proposal, forecast
from fleetstart.controller.function_openapi import function_document
from fleetstart.controller.history import History, no_trace
from fleetstart.controller.invocations.api import InvocationsApi
from fleetstart.controller.invocations.schedules import check_schedule
from fleetstart.controller.json_http import function_asked_for, json_answer, json_body, now_unix_ms
from fleetstart.controller.objects import ObjectStore
from fleetstart.controller.planner.where import lack, wanted_by
from fleetstart.controller.pool import broken
from fleetstart.controller.records import LIVE, FunctionRecord, VersionKey
from fleetstart.controller.redis_client import REDIS_DOWN
from fleetstart.controller.registry import Registry
from fleetstart.controller.resources import Deployed, FunctionInfo, Prediction, SystemStatus
from fleetstart.controller.responses import error_headers, error_json
from fleetstart.controller.seeing.api import SeeingApi
from fleetstart.controller.seeing.context import REQUEST
from fleetstart.controller.shells import Shells
from fleetstart.controller.store_api import StoreApi
from fleetstart.controller.versions import limits_of, pointed, scale_of
from fleetstart.controller.versions_api import VersionsApi
from fleetstart.controller.view import View
from fleetstart.runtime.contract.errors import FleetError, InvalidInput, InvalidSpec, NotFound, Unavailable
from fleetstart.runtime.contract.function import SPEC_MAX_BYTES, FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from fleetstart.runtime.contract.ledger import InvocationTrace
from fleetstart.runtime.contract.orders import FINAL
from fleetstart.runtime.contract.reports import FunctionLoad

log = logging.getLogger(__name__)

LIMIT_MAX = 1000
TAIL_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the handlers need; built by `app`."""

    config: Config
    gateway: str
    view: View
    registry: Registry
    store: ObjectStore
    checkpoints: Checkpoints
    history: History
    billing: BillingApi
    seeing: SeeingApi
    invocations: InvocationsApi
    access: AccessApi
    shells: Shells
    stopping: asyncio.Event


class Api:
    def __init__(self, services: Services) -> None:
        self._services = services
        self.app = Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/openapi.json", self.openapi),
                Route("/api/v1/status", self.status),
                *StoreApi(services.store, services.checkpoints).routes,
                Route("/api/v1/functions", self.deploy, methods=["POST"]),
                Route("/api/v1/functions", self.functions),
                Route("/api/v1/forecast", self.forecast, methods=["POST"]),
                Route("/api/v1/functions/{name}", self.delete, methods=["DELETE"]),
                Route("/api/v1/functions/{name}", self.function),
                *VersionsApi(services.view, services.registry).routes,
                Route("/api/v1/functions/{name}/logs", self.logs),
                WebSocketRoute("/api/v1/functions/{name}/shell", services.shells),
                Route("/api/v1/functions/{name}/openapi.json", self.interface),
                Route("/api/v1/invocations", self.invocations),
                *services.invocations.routes,
                Route("/api/v1/invocations/{id}", self.invocation),
                Route("/api/v1/invocations/{id}/plan", self.plan),
                *services.billing.routes,
                *services.seeing.routes,
                *services.access.routes,
            ],
            exception_handlers={
                FleetError: _fleet_error,
                HTTPException: _http_error,
                **dict.fromkeys(REDIS_DOWN, _redis_error),
                Exception: _unforeseen,
            },
        )

    async def healthz(self, request: Request) -> Response:
        return json_answer({"ok": True})

    async def openapi(self, request: Request) -> Response:
        return json_answer(document(self._services.config.url))

    async def status(self, request: Request) -> Response:
        services, view, caller = self._services, self._services.view, caller_of(request)
        now_ns = time.monotonic_ns()
        return json_answer(
            SystemStatus(
                version=installed_version("fleetstart"),
                url=services.config.url,
                gateway=services.gateway,
                leader=view.leader,
                redis=view.redis,
                store=services.config.store,
                nodes=[seen.report for seen in view.nodes.values() if not seen.lost(now_ns) and not caller.limited],
                functions=[self._info(record) for record in view.functions.values() if caller.sees(record.name)],
                budgets=[info for info in services.billing.shown() if caller.sees(info.function)],
                limited=caller.limited,
            )
        )

    # ── functions ──────────────────────────────────────────────────────────────────────────────────

    async def deploy(self, request: Request) -> Response:
        spec = self._services.access.deployable(
            caller_of(request),
            await json_body(request, FunctionSpec, limit_bytes=2 * SPEC_MAX_BYTES, error=InvalidSpec),
        )
        about(request, spec.name)
        check_schedule(spec)
        record, created = await self._services.registry.deploy(
            spec,
            now_unix_ms(),
            alias=request.query_params.get("alias", LIVE),
            percent=_number(request, "percent", 100, 1000),
            probe=_flag(request, "probe"),
        )
        function = self._services.view.functions.get(spec.name)
        rollout = function.rollout if function is not None else None
        return json_answer(
            Deployed(
                name=spec.name,
                version=record.version,
                url=self._url(spec.name),
                created=created,
                trying=rollout is not None and rollout.version == record.version,
                warning=self._warning(spec),
            )
        )

    def _warning(self, spec: FunctionSpec) -> str:
        now_ns = time.monotonic_ns()
        nodes = [seen.report for seen in self._services.view.nodes.values() if not seen.lost(now_ns)]
        why, _ = lack(wanted_by(spec), nodes)
        return f"function {spec.name}: {why}; its calls wait, and get 503" if why else ""

    async def forecast(self, request: Request) -> Response:
        proposal = await json_body(request, Proposal, limit_bytes=2 * SPEC_MAX_BYTES, error=InvalidSpec)
        self._known()
        view = self._services.view
        return json_answer(forecast(view, proposal, now_ns=time.monotonic_ns(), now_unix_ns=time.time_ns()))

    async def functions(self, request: Request) -> Response:
        caller = caller_of(request)
        return json_answer([self._info(record) for record in self._known().values() if caller.sees(record.name)])

    async def function(self, request: Request) -> Response:
        return json_answer(self._info(self._record(request.path_params["name"])))

    async def delete(self, request: Request) -> Response:
        name = FunctionName(request.path_params["name"])
        record = self._known().get(name)
        info = self._info(record) if record is not None else None
        await self._services.registry.delete(name)
        return json_answer(info)

    async def logs(self, request: Request) -> Response:
        name = FunctionName(request.path_params["name"])
        self._record(name)
        tail = _number(request, "tail", 100, TAIL_MAX)
        follow = _flag(request, "follow")
        lines = self._services.history.logs(name, tail, follow=follow, stopping=self._services.stopping)
        return StreamingResponse(_ending_quietly(lines), media_type="application/x-ndjson")

    async def interface(self, request: Request) -> Response:
        """Of one version; it wakes nothing."""
        record = self._record(request.path_params["name"])
        wanted = request.query_params.get("version") or LIVE
        if wanted.isascii() and wanted.isdecimal() and len(wanted) < 10:
            number = Version(int(wanted))
        else:
            number = pointed(record, wanted)
        version = await self._services.registry.version(record.name, number)
        reference = f"@{wanted}" if wanted != LIVE else ""
        return json_answer(function_document(version.spec, number, self._url(record.name) + reference))

    def _known(self) -> dict[FunctionName, FunctionRecord]:
        view = self._services.view
        if not view.synced:
            raise Unavailable(f"functions are not known yet, Redis was not read: {view.redis}", retry_after_s=1)
        return view.functions

    def _record(self, name: str) -> FunctionRecord:
        record = self._known().get(FunctionName(name))
        if record is None:
            raise NotFound(f"function {name[:80]} does not exist", hint="`fs ls` lists what does")
        return record

    def _info(self, record: FunctionRecord) -> FunctionInfo:
        view = self._services.view
        key = VersionKey(record.name, record.live)
        load = view.loads().get(str(key), FunctionLoad(0, 0))
        failure = view.failures.get(key)
        workers = [s for s in view.statuses.values() if s.function == record.name and s.state not in FINAL]
        return FunctionInfo(
            name=record.name,
            version=record.live,
            url=self._url(record.name),
            spec=view.versions[key].spec,
            deployed_unix_ms=record.deployed_unix_ms,
            workers=[msgspec.structs.replace(status, token="") for status in workers],
            queued=load.queued,
            running=load.running,
            broken=failure.error if failure is not None and broken(failure, now_unix_ms()) else None,
            prediction=self._prediction(key),
            scale=scale_of(record, view.versions[key].spec),
            limits=limits_of(record, view.versions[key].spec),
        )

    def _url(self, name: FunctionName) -> str:
        return f"{self._services.config.url}/fn/{name}"

    # ── records ────────────────────────────────────────────────────────────────────────────────────

    async def invocations(self, request: Request) -> Response:
        limit = _number(request, "limit", 20, LIMIT_MAX)
        return json_answer(
            await self._services.history.invocations(function_asked_for(request), limit, caller_of(request).sees)
        )

    async def invocation(self, request: Request) -> Response:
        kept = await self._services.invocations.one(request)
        return json_answer(kept or await self._trace(request))

    async def plan(self, request: Request) -> Response:
        services = self._services
        trace = await self._trace(request)
        plan = await services.history.plan(trace)
        key = VersionKey(trace.row.function, trace.row.version)
        version = services.view.versions.get(key)
        is_llm = version is not None and version.spec.llm is not None
        return json_answer(invocation_plan(trace, plan, is_llm=is_llm, prediction=self._prediction(key)))

    async def _trace(self, request: Request) -> InvocationTrace:
        """Errors: NotFound, also for one that is none of the caller's."""
        invocation = InvocationId(request.path_params["id"])
        trace = await self._services.history.trace(invocation)
        if not caller_of(request).sees(trace.row.function):
            raise no_trace(invocation)
        return trace

    def _prediction(self, key: VersionKey) -> Prediction | None:
        measures = self._services.view.version_measures.get(key)
        if measures is None or not measures.ttft_error.count:
            return None
        return Prediction(error=measures.ttft_error.value, starts=measures.ttft_error.count)


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name) or str(default)
    if not text.isdecimal() or len(text) > 18:
        raise InvalidInput(f"{name}={text[:40]!r} must be a whole number, 0 or more")
    return min(int(text), most)


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "0") not in ("", "0", "false")


async def _ending_quietly(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A follow that has begun ends when Redis goes away; its reader asks again."""
    try:
        async for line in lines:
            yield line
    except REDIS_DOWN:
        return


async def _fleet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FleetError)
    request_id = REQUEST.get()
    headers = {name.decode(): value.decode() for name, value in error_headers(error, request_id)}
    return Response(error_json(error, request_id), status_code=error.status, headers=headers)


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("a request failed in an unforeseen way", extra={"path": request.url.path}, exc_info=error)
    return await _fleet_error(request, FleetError(f"{type(error).__name__} in the controller: its log says where"))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = NotFound(f"{request.method} {request.url.path} is not there", hint="/openapi.json lists what is")
    response = await _fleet_error(request, shown)
    response.status_code = error.status_code
    return response


async def _redis_error(request: Request, error: Exception) -> Response:
    return await _fleet_error(
        request, Unavailable("Redis does not answer, so nothing can be read or changed", retry_after_s=1)
    )
