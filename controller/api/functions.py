"""Handlers of functions: deploy, forecast, list, logs, OpenAPI, delete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, cast

import msgspec
import redis.asyncio as redis
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidSpec, NotFound, Unavailable
from fleetstart.runtime.contract.function.spec import SPEC_MAX_BYTES, FunctionSpec
from fleetstart.runtime.contract.ids import LIVE, FunctionName, Version
from fleetstart.runtime.contract.node.orders import FINAL
from fleetstart.runtime.contract.node.reports import FunctionLoad

from ..async_invocations.cron_schedules import check_schedule
from ..auth.authorize import Caller
from ..auth.deploy_policy import apply_deploy_policy, check_devices, check_kv_memory, named_spec
from ..auth.request_context import caller_of, set_audit_object
from ..function_calls.rules import missing_callees
from ..http.json_api import PlacedResponse, json_body, json_response, now_unix_ms, query_flag, query_int
from ..planner.constraints import admits, constraints_of, too_large, unmet_constraint
from ..planner.estimates import is_calibrated
from ..registry.registry import Registry
from ..scheduler.deploy_forecast import forecast
from ..scheduler.worker_pool import broken
from ..schemas.functions import Deployed, FailedStart, FunctionInfo, FunctionSummary, Prediction, WorkerSummary
from ..schemas.planning import Proposal
from ..state.records import FunctionRecord, VersionKey, VersionRecord
from ..state.redis_client import REDIS_ERRORS
from ..state.redis_server.stream_followers import Entry, StreamFollowers
from ..state.traffic import last_failure, limits_of, scale_of, version_of_alias
from ..state.unreadable import unreadable
from ..state.view import View
from .openapi.invoke_document import function_document

TAIL_MAX = 10_000
INFOS_AT_ONCE = 200
"""Functions of a list that are made in one turn of the loop: about two milliseconds."""
STOPPING_S = 1.0
"""Time in which a follower that gets no lines sees that the controller stops, or that its key is good no more."""

LogEntries = list[Entry]


class FunctionsApi:
    def __init__(
        self,
        *,
        url: str,
        view: View,
        registry: Registry,
        client: redis.Redis,
        followers: StreamFollowers,
        stopping: asyncio.Event,
    ) -> None:
        self._at = url
        self._view = view
        self._registry = registry
        self._client = client
        self._followers = followers
        self._stopping = stopping

    async def deploy(self, request: Request) -> Response:
        asked = await json_body(request, FunctionSpec, limit_bytes=2 * SPEC_MAX_BYTES, error=InvalidSpec)
        spec = apply_deploy_policy(self._view, caller_of(request), asked)
        set_audit_object(request, spec.name)
        check_schedule(spec)
        record, created = await self._registry.deploy(
            spec,
            now_unix_ms(),
            alias=request.query_params.get("alias", LIVE),
            percent=query_int(request, "percent", 100, 1000),
            probe=query_flag(request, "probe"),
        )
        function = self._view.functions.get(spec.name)
        rollout = function.rollout if function is not None else None
        return json_response(
            Deployed(
                name=spec.name,
                version=record.version,
                url=self._url(spec.name),
                created=created,
                trying=rollout is not None and rollout.version == record.version,
                started=function is not None and function.started == record.version,
                last_failure=self._last_failure(function) if function is not None and not created else None,
                warning=self._warning(record),
            )
        )

    def _warning(self, record: VersionRecord) -> str:
        spec = record.spec
        now_ns = time.monotonic_ns()
        nodes = [seen.report for seen in self._view.nodes.values() if not seen.lost(now_ns)]
        wanted = constraints_of(spec, record.packages_for)
        why, _ = unmet_constraint(wanted, nodes)
        why = why or too_large(
            spec.memory_bytes, max((node.memory_bytes for node in nodes if admits(wanted, node)), default=None)
        )
        unmet = f"function {spec.name}: {why}; its calls wait, and get 503" if why else ""
        missing = missing_callees(spec, self._view.functions)
        return "; ".join(text for text in (unmet, missing) if text)

    async def forecast(self, request: Request) -> Response:
        proposal = await json_body(request, Proposal, limit_bytes=2 * SPEC_MAX_BYTES, error=InvalidSpec)
        self._known()
        view = self._view
        spec = named_spec(view, caller_of(request), proposal.spec)
        check_kv_memory(view, spec)
        check_devices(view, spec)
        proposal = msgspec.structs.replace(proposal, spec=spec)
        return json_response(forecast(view, proposal, now_ns=time.monotonic_ns(), now_unix_ns=time.time_ns()))

    async def functions(self, request: Request) -> Response:
        caller = caller_of(request)
        self._known()
        return json_response(await self.infos(caller.sees))

    async def function(self, request: Request) -> Response:
        return json_response(self.info(self._record(request.path_params["name"])))

    async def delete(self, request: Request) -> Response:
        name = FunctionName(request.path_params["name"])
        record = self._known().get(name)
        readable = record is not None and VersionKey(record.name, record.live) in self._view.versions
        info = self.info(record) if record is not None and readable else None
        await self._registry.delete(name, now_unix_ms())
        return json_response(info)

    async def logs(self, request: Request) -> Response:
        name = FunctionName(request.path_params["name"])
        first = self._record(name).first
        tail = query_int(request, "tail", 100, TAIL_MAX)
        follow = query_flag(request, "follow")
        caller = caller_of(request)
        lines = _ending_quietly(self._log_lines(keys.logs(name), tail, first, caller, follow=follow))
        if not follow:
            return StreamingResponse(lines, media_type="application/x-ndjson")
        place = self._followers.place(caller.name)
        return PlacedResponse(lines, place, media_type="application/x-ndjson")

    async def _log_lines(
        self, key: str, tail: int, first: Version, caller: Caller, *, follow: bool
    ) -> AsyncIterator[bytes]:
        """JSON lines as the node wrote them: the newest `tail`, then with `follow` the new ones until disconnect, or
        until the caller's key is revoked or expires.

        Versions below `first` were of an earlier function of the name, whose workers may still drain.
        """
        page: LogEntries = []
        if tail > 0:
            page = await cast(Awaitable[Any], self._client.xrevrange(key, "+", "-", tail))
        last = page[0][0] if page else await self._last_log_id(key)
        yield _joined(reversed(page), first)
        if not follow:
            return
        pages = self._followers.follow(key, last.decode(), quiet_s=STOPPING_S)
        async with contextlib.aclosing(pages):
            async for batch in pages:
                if self._stopping.is_set() or not caller.still_valid(self._view.access, now_unix_ms()):
                    return
                if batch:
                    yield _joined(batch, first)

    async def _last_log_id(self, key: str) -> bytes:
        newest: LogEntries = await cast(Awaitable[Any], self._client.xrevrange(key, "+", "-", 1))
        return newest[0][0] if newest else b"0"

    async def interface(self, request: Request) -> Response:
        """The OpenAPI document of one version's calls, without starting a worker."""
        record = self._record(request.path_params["name"])
        wanted = request.query_params.get("version") or LIVE
        if wanted.isascii() and wanted.isdecimal() and len(wanted) < 10:
            number = Version(int(wanted))
        else:
            number = version_of_alias(record, wanted)
        version = await self._registry.version(record.name, number)
        reference = f"@{wanted}" if wanted != LIVE else ""
        return json_response(function_document(version.spec, number, self._url(record.name) + reference))

    def _known(self) -> dict[FunctionName, FunctionRecord]:
        view = self._view
        if not view.synced:
            raise Unavailable("functions are not known yet, Redis was not read", retry_after_s=1)
        return view.functions

    def _record(self, name: str) -> FunctionRecord:
        record = self._known().get(FunctionName(name))
        if record is None:
            raise NotFound(f"function {name[:127]} does not exist", hint="`fs ls` lists what does")
        return record

    async def infos(self, sees: Callable[[FunctionName], bool], *, summary: bool = False) -> list[msgspec.Raw]:
        """Functions that `sees` admits, by name, encoded, some in a turn of the loop: ten thousand take a tenth
        of a second. One whose live version this release cannot read is in the status only. `summary`: as
        FunctionSummary."""
        view, found = self._view, list[msgspec.Raw]()
        records = sorted((one for one in view.functions.values() if sees(one.name)), key=lambda one: one.name)
        for begin in range(0, len(records), INFOS_AT_ONCE):
            for record in records[begin : begin + INFOS_AT_ONCE]:
                if VersionKey(record.name, record.live) in view.versions:
                    shown = self._summary(record) if summary else self.info(record)
                    found.append(msgspec.Raw(msgspec.json.encode(shown)))
            await asyncio.sleep(0)
        return found

    def info(self, record: FunctionRecord) -> FunctionInfo:
        view = self._view
        key = VersionKey(record.name, record.live)
        if key not in view.versions:
            error = view.unreadable.error("version", str(key)) or "it has not been read yet"
            raise unreadable(f"version {key.version} of {key.name}", error)
        load = view.loads().get(str(key), FunctionLoad(0, 0))
        failure = view.failures.get(key)
        workers = [status for status in view.statuses_of(record.name).values() if status.state not in FINAL]
        return FunctionInfo(
            name=record.name,
            version=record.live,
            url=self._url(record.name),
            spec=view.versions[key].spec,
            deployed_unix_ms=record.deployed_unix_ms,
            workers=[msgspec.structs.replace(status, token="") for status in workers],
            queued=load.queued,
            running=load.running,
            async_calls=view.async_calls.get(record.name, 0),
            last_failure=self._last_failure(record),
            broken=failure.error if failure is not None and broken(failure, now_unix_ms()) else None,
            prediction=prediction_of(view, key),
            scale=scale_of(record, view.versions[key].spec),
            limits=limits_of(record, view.versions[key].spec),
        )

    def _summary(self, record: FunctionRecord) -> FunctionSummary:
        view = self._view
        key = VersionKey(record.name, record.live)
        spec, load, failure = view.versions[key].spec, view.loads().get(str(key)), view.failures.get(key)
        return FunctionSummary(
            name=record.name,
            version=record.live,
            project=spec.project,
            tags=spec.tags,
            weights=spec.weights,
            adapter=spec.adapter,
            workers=[
                WorkerSummary(
                    worker=one.worker,
                    node=one.node,
                    function=one.function,
                    version=one.version,
                    state=one.state,
                    start=one.start,
                )
                for one in view.statuses_of(record.name).values()
                if one.state not in FINAL
            ],
            queued=load.queued if load is not None else 0,
            running=load.running if load is not None else 0,
            broken=failure is not None and broken(failure, now_unix_ms()),
            last_failure=last_failure(record, failure) is not None,
        )

    def _last_failure(self, record: FunctionRecord) -> FailedStart | None:
        found = last_failure(record, self._view.failures.get(VersionKey(record.name, record.live)))
        return FailedStart(unix_ms=found.unix_ms, error=found.error) if found is not None else None

    def _url(self, name: FunctionName) -> str:
        return f"{self._at}/fn/{name}"


class _LineOrigin(msgspec.Struct):
    """The version in a log line."""

    version: Version


_ORIGIN = msgspec.json.Decoder(_LineOrigin)


def _joined(entries: Iterable[tuple[bytes, dict[bytes, bytes]]], first: Version) -> bytes:
    lines = (fields[b"line"] for _, fields in entries)
    return b"".join(line + b"\n" for line in lines if _ORIGIN.decode(line).version >= first)


def prediction_of(view: View, key: VersionKey) -> Prediction | None:
    measures = view.version_measures.get(key)
    if measures is None or not measures.ttft_error.count:
        return None
    error = measures.ttft_error
    return Prediction(error=error.value, starts=error.count, calibrated=is_calibrated(measures))


async def _ending_quietly(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Ends a stream that has begun when Redis does not answer; the client reconnects."""
    try:
        async for line in lines:
            yield line
    except REDIS_ERRORS:
        return
