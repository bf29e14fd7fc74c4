"""The door for invocations: `ANY /fn/{name}[@{version}][/path...]`, as a bare ASGI app.

Checks the request, admits it, keeps its deadline, notices a client that leaves, and closes its books. Which
worker, and how often, is for `routes` and `invoke`. The hot path makes no task and touches no Redis.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Callable

from fleetstart.controller.admission import BODY_BUDGET_FACTOR
from fleetstart.controller.billing.watch import BillingWatch
from fleetstart.controller.client_watch import ClientWatch
from fleetstart.controller.headers import request_headers, sane_request_id, timeout_s
from fleetstart.controller.invoke import Cut, Invoker, open_session
from fleetstart.controller.ledger import LedgerWriter
from fleetstart.controller.outcomes import answer_error, cost, first_answer, first_byte_ms, start_kind
from fleetstart.controller.pool import broken
from fleetstart.controller.prospects import Prospects, start_failure
from fleetstart.controller.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.responses import Receive, Scope, Send
from fleetstart.controller.routes import Call, Route
from fleetstart.controller.seeing.context import TRACE
from fleetstart.controller.state import REDIS_DOWN, State
from fleetstart.controller.target import Target, parse_target
from fleetstart.controller.uploads import ClientGone, declared_bytes, header, read_body, refuse_unread, too_large
from fleetstart.controller.versions import chosen
from fleetstart.runtime.contract.errors import (
    DeadlineExceeded,
    FleetError,
    NotFound,
    QueueFull,
    Unavailable,
)
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId, new_invocation_id
from fleetstart.runtime.contract.ledger import InvocationRow, InvocationTrace, OpenInvocation
from fleetstart.runtime.contract.messages import FINAL, GatewayReport, WorkerStatus

log = logging.getLogger(__name__)

REST_S = 0.1
"""After the last call of a version, until the scheduler hears that it has none: another may be about to come."""
LAST_WORDS_S = 1.0
"""How long to wait for the node to tell why a worker died."""
CLIENT_GONE = 499


class Gateway:
    def __init__(
        self,
        gateway: str,
        state: State,
        ledger: LedgerWriter,
        billing: BillingWatch,
        *,
        max_body_bytes: int,
        demand: Callable[[], None],
        freed: Callable[[], None],
    ) -> None:
        """`demand` is told when a call must wait, `freed` when others should hear soon that calls have ended."""
        self.id = gateway
        self._freed = freed
        self._state = state
        self._view = state.view
        self._prospects = Prospects(state.view)
        self._ledger = ledger
        self._billing = billing
        self._max_body_bytes = max_body_bytes
        self._body_bytes = 0
        self._routes: dict[VersionKey, Route] = {}
        self._obituaries: dict[WorkerId, list[asyncio.Future[WorkerStatus]]] = {}
        self._session = open_session()
        self._invoker = Invoker(
            self._session,
            demand=demand,
            book=self._book,
            order_of=self._view.orders.get,
            final_status=self._final_status,
        )
        self._view.on_worker(self._heard)
        self._view.on_change(self.check_waiting)

    async def close(self) -> None:
        await self._session.close()

    # ── one request ────────────────────────────────────────────────────────────────────────────────

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted_ns, accepted_unix_ns = time.monotonic_ns(), time.time_ns()
        request_id = sane_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        held_bytes = 0
        try:
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            route = await self._route(target, request_id)
            self._admit(route, declared_bytes(scope))
            price = self._billing.price(accepted_unix_ns // 1_000_000)
            limit_s = timeout_s(header(scope, b"fs-timeout-s"), route.spec.timeout_s)
            async with asyncio.timeout(limit_s):
                body = await read_body(scope, receive, self._max_body_bytes)
        except ClientGone:
            return
        except TimeoutError:
            error: FleetError = DeadlineExceeded("the request's body did not arrive within the call's time")
            await refuse_unread(scope, receive, send, error, request_id)
            return
        except FleetError as refusal:
            await refuse_unread(scope, receive, send, refusal, request_id)
            return
        call = Call(
            id=InvocationId(request_id),
            method=scope["method"],
            target=target.rest,
            headers=request_headers(scope["headers"]),
            body=body,
            accepted_ns=accepted_ns,
            accepted_unix_ns=accepted_unix_ns,
            deadline_ns=accepted_ns + round(limit_s * 1e9),
            price=price,
        )
        held_bytes = len(body)
        self._body_bytes += held_bytes
        # While the body came, a route that nobody seemed to need may have been forgotten.
        route = self._open_route(route.key, route.record)
        route.arrived += 1
        try:
            await self._serve(route, call, receive, send)
        finally:
            self._body_bytes -= held_bytes

    async def _serve(self, route: Route, call: Call, receive: Receive, send: Send) -> None:
        self._ledger.opened(
            OpenInvocation(
                id=call.id,
                gateway=self.id,
                function=route.key.name,
                version=route.key.version,
                accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
            )
        )
        watch = ClientWatch(call, receive)
        limit = asyncio.timeout(max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9))
        try:
            async with limit:
                await self._invoker.run(route, call, send)
        except TimeoutError:
            await self._end_badly(route, call, self._late(route, call), send)
        except Cut as cut:
            self._leave(route, call, waive=True)
            await self._end_badly(route, call, cut.error, send)
        except FleetError as error:
            await self._end_badly(route, call, error, send)
        except asyncio.CancelledError:
            call.status, call.error = CLIENT_GONE, "client_gone"
            self._leave(route, call, waive=False)
            if not watch.gone:
                call.status, call.error = 503, Unavailable.code
                raise
            watch.absolve()
        except Exception as error:
            log.exception("a call failed in the gateway", extra={"invocation": call.id})
            await self._end_badly(route, call, FleetError(f"{type(error).__name__} in the gateway"), send)
        finally:
            watch.stop()
            self._leave(route, call, waive=True)
            self._book(route, call)
            if len(self._view.gateways) > 1:
                self._freed()
            if route.idle and not route.telling:
                self._tell_rest_soon(route)

    def _tell_rest_soon(self, route: Route) -> None:
        route.telling = True
        asyncio.get_running_loop().call_later(REST_S, self._tell_rest, route)

    def _tell_rest(self, route: Route) -> None:
        """The keep-alive counts from the last call, so the scheduler should hear soon that there is none."""
        route.telling = False
        if not route.idle:
            return
        if route.peak:  # this report still tells of the calls that there were, the next that they have ended
            self._tell_rest_soon(route)
        self._freed()

    async def _end_badly(self, route: Route, call: Call, error: FleetError, send: Send) -> None:
        self._leave(route, call, waive=not isinstance(error, DeadlineExceeded))
        if not any(phase.name == "queue" for phase in call.timeline.phases):
            call.timeline.add("queue", call.accepted_ns, call.dispatched_ns or time.monotonic_ns())
        if not call.finished:
            call.error = error.code
            call.status = call.status if call.begun else error.status
            self._book(route, call)
        await answer_error(route, call, error, send)

    def _leave(self, route: Route, call: Call, *, waive: bool) -> None:
        """Wherever the call is, it is there no longer; harmless if it was nowhere."""
        route.queue.remove(call)
        if call.worker is not None and call in call.worker.calls:
            never_sent = call.attempts == 0  # it was given a slot in the moment in which it stopped waiting
            call.billed_ms = route.leave(call, time.monotonic_ns(), waive=waive or never_sent)

    def _late(self, route: Route, call: Call) -> DeadlineExceeded:
        allowed_s = (call.deadline_ns - call.accepted_ns) / 1e9
        if call.worker is not None and call in call.worker.calls:
            where = f"it ran {(time.monotonic_ns() - call.dispatched_ns) / 1e9:.3g} s on its worker"
            hint = "raise `timeout`, or make the handler quicker"
        else:
            failure = self._view.failures.get(route.key)
            where = "it waited for a worker" + (
                f", whose last start failed: {failure.error.message}" if failure else ""
            )
            hint = f"`fs status` and `fs logs {route.key.name}` tell why none came"
        return DeadlineExceeded(f"function {route.key.name}: no answer within {allowed_s:g} s: {where}", hint=hint)

    def _book(self, route: Route, call: Call) -> None:
        """Once a call, before its last byte goes out: whoever has an answer has a row."""
        if call.finished:
            return
        call.finished = True
        worker = call.worker
        now_ns = time.monotonic_ns()
        queue_ns = call.queue_ns if call.attempts else now_ns - call.accepted_ns
        row = InvocationRow(
            id=call.id,
            function=route.key.name,
            version=route.key.version,
            worker=worker.id if worker is not None else WorkerId(""),
            status=call.status,
            error=call.error,
            start=start_kind(call, worker) if worker is not None else "cold",
            accepted_unix_ms=call.accepted_unix_ns // 1_000_000,
            queue_ms=queue_ns // 1_000_000,
            billed_ms=call.billed_ms,
            memory_bytes=route.spec.memory_bytes,
            rate_nusd_per_gib_s=call.price.execute_nusd_per_gib_s,
            price=call.price.version,
            tags=route.spec.tags,
            cost_nusd=cost(route, call),
            attempts=call.attempts,
            total_ms=(now_ns - call.accepted_ns) // 1_000_000,
            first_byte_ms=first_byte_ms(call),
        )
        status = worker.status if worker is not None else None
        trace = InvocationTrace(
            row=row,
            timeline=call.timeline,
            isolation=status.isolation if status is not None else "",
            pooled=status.pooled if status is not None else False,
            events=call.event_count,
            relayed=status.relayed if status is not None and row.start != "hot" else (),
            node=status.node if status is not None else "",
            fetched=status.fetched if status is not None and row.start != "hot" else {},
            context=TRACE.get(),
        )
        self._ledger.ended(trace, first_answer(route, call))

    # ── admission ──────────────────────────────────────────────────────────────────────────────────

    async def _route(self, target: Target, request_id: str) -> Route:
        record = self._view.functions.get(target.name)
        if record is None:
            record = await self._ask(target.name)
        number = target.version
        if number is None:
            number = chosen(record, target.alias, request_id, lambda version: self._is_broken(target.name, version))
        key = VersionKey(target.name, number)
        route = self._routes.get(key)
        if route is not None:
            return route
        try:
            version = await self._state.version(key)
        except REDIS_DOWN as error:
            raise Unavailable(f"{key} is not known here and Redis is away", retry_after_s=1) from error
        if version is None:
            raise NotFound(
                f"function {key.name} has no version {key.version}", hint=f"version {record.live} is its live one"
            )
        return self._open_route(key, version)

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
            except REDIS_DOWN as error:
                raise Unavailable(f"function {name} is not known here and Redis is away", retry_after_s=1) from error
            if record is not None:
                return record
        near = difflib.get_close_matches(name[:63], self._view.functions, n=1)
        hint = f"did you mean {near[0]}?" if near else "`fs ls` lists what there is"
        raise NotFound(f"function {name[:80]} does not exist", hint=hint)

    def _open_route(self, key: VersionKey, version: VersionRecord) -> Route:
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(
                key,
                version,
                elsewhere=lambda worker: self._view.running_elsewhere(worker, key, self.id),
                later=asyncio.get_running_loop().call_later,
            )
            for status in list(self._view.statuses.values()):
                if status.function == key.name and status.version == key.version:
                    route.heard(status, 0)  # ready before anybody called here: hot
        return route

    def _admit(self, route: Route, body_bytes: int) -> None:
        if body_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        now_unix_ms = time.time_ns() // 1_000_000
        error = self._billing.refusal(route.key.name, now_unix_ms) or start_failure(self._view, route, now_unix_ms)
        if error is not None:
            raise error
        if route.queue.full:
            raise route.full()
        if self._body_bytes + body_bytes > self._max_body_bytes * BODY_BUDGET_FACTOR:
            raise QueueFull(
                f"this gateway holds {self._body_bytes} bytes of bodies of calls under way and takes no more",
                retry_after_s=route.service_time.retry_after_s(len(route.queue), len(route.workers)),
            )

    # ── while calls wait ───────────────────────────────────────────────────────────────────────────

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
                ended = self._prospects.hopeless(route, now_ns, time.time_ns() // 1_000_000)
                if ended is not None:
                    route.fail(*ended)
            elif route.idle and not route.workers:
                record = self._view.functions.get(key.name)
                if record is None or record.live != key.version:
                    del self._routes[key]

    async def _final_status(self, worker: WorkerId) -> WorkerStatus | None:
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

    def report(self) -> GatewayReport:
        """What waits and runs here; also what did since the last published report (see `Route.peak`)."""
        loads = {}
        for key, route in self._routes.items():
            load = route.load()
            if load.queued or load.running:
                loads[str(key)] = load
        return GatewayReport(gateway=self.id, loads=loads)

    def published(self) -> None:
        for route in self._routes.values():
            route.peak = 0
