"""The management API under /api/v1, as `resources` describes it: what it is made of, the system's status, and records.

What deals with functions is in `functions_api` and `versions_api`, what deals with the store alone in `store_api`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from importlib.metadata import version as installed_version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.errors import FleetError, NotFound, Unavailable
from fleetstart.runtime.contract.ids import InvocationId

from ..auth.request_context import caller_of
from ..http.asgi import error_headers, error_json
from ..http.json_api import json_response, query_function, query_int
from ..http.request_context import REQUEST
from ..registry.checkpoints import Checkpoints
from ..registry.registry import Registry
from ..schemas.functions import SystemStatus
from ..shell.service import ShellService
from ..state.records import VersionKey
from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from ..storage.object_store import ObjectStore
from .audit import AccessApi
from .billing import BillingApi
from .explain import invocation_plan
from .functions import FunctionsApi, prediction_of
from .history import History, no_trace
from .invocations import InvocationsApi
from .metrics import ObservabilityApi
from .objects import ObjectsApi
from .openapi.document import document
from .versions import VersionsApi

log = logging.getLogger(__name__)

LIMIT_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServices:
    """What the handlers need; built by `app`."""

    url: str
    """Of this controller, as others reach it."""
    store_url: str
    open_access: bool
    """Whether it was started to answer without keys."""
    gateway: str
    view: View
    registry: Registry
    store: ObjectStore
    checkpoints: Checkpoints
    history: History
    billing: BillingApi
    seeing: ObservabilityApi
    invocations: InvocationsApi
    access: AccessApi
    shells: ShellService
    stopping: asyncio.Event


class ManagementApi:
    def __init__(self, services: ApiServices) -> None:
        self._services = services
        self._functions = FunctionsApi(
            url=services.url, view=services.view, registry=services.registry, history=services.history,
            access=services.access, stopping=services.stopping,
        )  # fmt: skip
        self.app = Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/openapi.json", self.openapi),
                Route("/api/v1/status", self.status),
                *ObjectsApi(services.store, services.checkpoints).routes,
                *self._functions.routes,
                *VersionsApi(services.view, services.registry).routes,
                WebSocketRoute("/api/v1/functions/{name}/shell", services.shells),
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
                **dict.fromkeys(REDIS_ERRORS, _redis_error),
                Exception: _unforeseen,
            },
        )

    async def healthz(self, request: Request) -> Response:
        return json_response({"ok": True})

    async def openapi(self, request: Request) -> Response:
        return json_response(document(self._services.url))

    async def status(self, request: Request) -> Response:
        services, view, caller = self._services, self._services.view, caller_of(request)
        now_ns = time.monotonic_ns()
        return json_response(
            SystemStatus(
                version=installed_version("fleetstart"),
                url=services.url,
                gateway=services.gateway,
                leader=view.leader,
                redis=view.redis,
                store=services.store_url,
                nodes=[seen.report for seen in view.nodes.values() if not seen.lost(now_ns) and not caller.limited],
                functions=[self._functions.info(one) for one in view.functions.values() if caller.sees(one.name)],
                budgets=[info for info in services.billing.shown() if caller.sees(info.function)],
                access="open" if services.open_access and not view.access.locked else "keys",
                limited=caller.limited,
            )
        )

    async def invocations(self, request: Request) -> Response:
        limit = query_int(request, "limit", 20, LIMIT_MAX)
        return json_response(
            await self._services.history.invocations(query_function(request), limit, caller_of(request).sees)
        )

    async def invocation(self, request: Request) -> Response:
        kept = await self._services.invocations.one(request)
        return json_response(kept or await self._trace(request))

    async def plan(self, request: Request) -> Response:
        services = self._services
        trace = await self._trace(request)
        plan = await services.history.plan(trace)
        key = VersionKey(trace.row.function, trace.row.version)
        version = services.view.versions.get(key)
        is_llm = version is not None and version.spec.llm is not None
        return json_response(invocation_plan(trace, plan, is_llm=is_llm, prediction=prediction_of(services.view, key)))

    async def _trace(self, request: Request) -> InvocationTrace:
        """Errors: NotFound, also for one that is none of the caller's."""
        invocation = InvocationId(request.path_params["id"])
        trace = await self._services.history.trace(invocation)
        if not caller_of(request).sees(trace.row.function):
            raise no_trace(invocation)
        return trace


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
