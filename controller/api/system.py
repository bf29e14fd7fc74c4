"""The system's health, status, OpenAPI document and audit log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import FleetError, InvalidInput

from ..auth.audit_log import AuditLog
from ..auth.request_context import caller_of
from ..http.json_api import json_response, query_flag
from ..peers.report import reported_copies
from ..schemas.functions import BudgetInfo, FunctionInfo, RedisMemory, SystemStatus, UnreadableInfo
from ..schemas.nodes import CopyInfo, NodeCertificate
from ..state.redis_probe import try_redis
from ..state.redis_server.memory_watch import MemoryWatch
from ..state.view import View
from ..storage.object_store import ObjectStore
from ..storage.probe import try_store
from .functions import FunctionsApi

TRIAL_S = 5.0
"""Longest trial of Redis and of the store."""
UNREADABLE_SHOWN = 100
UNTOLD = "unavailable"
"""State of Redis for limited keys: its errors name hosts and users."""
AUDIT_ROWS = 1_000
AUDIT_ROWS_MAX = 10_000


class SystemApi:
    def __init__(
        self,
        *,
        url: str,
        store_url: str,
        store: ObjectStore,
        redis_url: str,
        gateway: str,
        open_access: bool,
        view: View,
        functions: FunctionsApi,
        audit: AuditLog,
        budgets: Callable[[], list[BudgetInfo]],
        document: Callable[[str], dict[str, Any]],
        memory: MemoryWatch,
        readiness: Callable[[], list[str]],
    ) -> None:
        """`url`: of this controller, as others reach it. `open_access`: whether it was started to serve without keys.
        `document` makes the OpenAPI document for a URL. `readiness`: why calls should go to another controller."""
        self._url = url
        self._store_url = store_url
        self._store = store
        self._redis_url = redis_url
        self._gateway = gateway
        self._open_access = open_access
        self._view = view
        self._functions = functions
        self._audit = audit
        self._budgets = budgets
        self._document = document
        self._readiness = readiness
        self._memory = memory

    async def healthz(self, request: Request) -> Response:
        return json_response({"ok": True})

    async def readyz(self, request: Request) -> Response:
        """Checks whether calls should come here: 200, or 503 with the reasons."""
        problems = self._readiness()
        return json_response({"ready": not problems, "problems": problems}, status=503 if problems else 200)

    async def openapi(self, request: Request) -> Response:
        return json_response(self._document(self._url))

    async def status(self, request: Request) -> Response:
        view, caller = self._view, caller_of(request)
        now_ns = time.monotonic_ns()
        redis_state, store_problem = view.redis, ""
        if caller.limited:
            redis_state = "ok" if view.redis == "ok" else UNTOLD
        elif query_flag(request, "probe"):
            redis_state, store_problem = await self._try_backends()
        functions = await self._shown_functions(request)
        return json_response(
            SystemStatus(
                version=installed_version("fleetstart"),
                url=self._url,
                gateway=self._gateway,
                leader=view.leader,
                redis=redis_state,
                redis_problems=self._memory.problems if not caller.limited else [],
                redis_memory=self._redis_memory() if not caller.limited else None,
                store=self._store_url if not caller.limited else "",
                store_problem=store_problem,
                nodes=[seen.report for seen in view.nodes.values() if not seen.lost(now_ns) and not caller.limited],
                draining=sorted(view.draining) if not caller.limited else [],
                copies=self._copies(now_ns) if not caller.limited else [],
                certificates=self._certificates() if not caller.limited else [],
                functions=functions,
                budgets=[info for info in self._budgets() if caller.sees(info.function)],
                access="open" if self._open_access and not view.access.locked else "keys",
                unreadable=self._unreadable() if not caller.limited else [],
                limited=caller.limited,
            )
        )

    async def _shown_functions(self, request: Request) -> list[FunctionInfo]:
        """The functions, as FunctionInfo, as FunctionSummary, or none of them. Errors: InvalidInput."""
        shown = request.query_params.get("functions", "full")
        if shown not in ("full", "summary", "none"):
            raise InvalidInput(f"functions={shown[:40]!r} must be full, summary or none")
        if shown == "none":
            return []
        infos = await self._functions.infos(caller_of(request).sees, summary=shown == "summary")
        return cast(list[FunctionInfo], infos)

    def _copies(self, now_ns: int) -> list[CopyInfo]:
        return [
            CopyInfo(
                node=one.node,
                checkpoint=one.checkpoint,
                state=one.state,
                ready_bytes=one.ready_bytes,
                size_bytes=one.size_bytes,
            )
            for one in reported_copies(self._view, now_ns)
        ]

    def _certificates(self) -> list[NodeCertificate]:
        return [
            NodeCertificate(
                node=one.node,
                key_sha256=one.key_sha256,
                joined_unix_ms=one.joined_unix_ms,
                expires_unix_ms=one.expires_unix_ms,
            )
            for one in self._view.identities.values()
        ]

    def _unreadable(self) -> list[UnreadableInfo]:
        shown = self._view.unreadable.all()[:UNREADABLE_SHOWN]
        return [UnreadableInfo(kind=one.kind, name=one.name, error=one.error) for one in shown]

    def _redis_memory(self) -> RedisMemory | None:
        facts = self._memory.facts
        if facts is None:
            return None
        return RedisMemory(used_bytes=facts.used_bytes, limit_bytes=facts.limit_bytes, families=self._memory.families)

    async def _try_backends(self) -> tuple[str, str]:
        """Writes to Redis and to the store, side by side: "ok" or Redis' problem, and "" or the store's."""
        redis, store = await asyncio.gather(
            try_redis(self._redis_url, timeout_s=TRIAL_S),
            try_store(self._store, timeout_s=TRIAL_S),
            return_exceptions=True,
        )
        for problem in (redis, store):
            if problem is not None and not isinstance(problem, FleetError):
                raise problem
        return (redis.message if isinstance(redis, FleetError) else "ok", _with_hint(store))

    async def audit(self, request: Request) -> Response:
        query = request.query_params
        since_unix_ms, limit = _number(query.get("since_unix_ms"), 0), _number(query.get("limit"), AUDIT_ROWS)
        return json_response(await self._audit.read(since_unix_ms, query.get("by", ""), min(limit, AUDIT_ROWS_MAX)))


def _with_hint(problem: BaseException | None) -> str:
    if not isinstance(problem, FleetError):
        return ""
    return f"{problem.message}; {problem.hint}" if problem.hint else problem.message


def _number(text: str | None, default: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise InvalidInput(f"{text[:40]!r} must be a whole number, 0 or more")
    return int(text)
