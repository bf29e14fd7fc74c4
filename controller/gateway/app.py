"""The door for invocations: `ANY /fn/{name}[@{version}][/path...]`, as a bare ASGI app.

Reads the request once the doorkeeper lets it in, keeps its deadline, notices a client that leaves, and answers for what
went wrong. Which worker, and how often, is for `routes` and `invoke`. The hot path makes no task and touches no Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError, Unavailable
from fleetstart.runtime.contract.ids import InvocationId, new_invocation_id
from fleetstart.runtime.contract.node.reports import GatewayReport
from fleetstart.runtime.contract.worker_headers import PROGRESS_HEADER

from ..billing.budget_watch import BudgetWatch
from ..billing.ledger_writer import LedgerWriter
from ..http.asgi import Receive, Scope, Send
from ..http.client import open_session
from ..http.headers import request_headers, sane_request_id
from ..http.invoke_url import Target, parse_target
from ..http.request_body import ClientGone, header, read_body, refuse_unread
from ..http.scope import PROGRESS
from ..state.sync import StateSync
from .admission.admission import Doorkeeper
from .admission.feasibility import Prospects
from .admission.wait_predictor import Waits
from .call_recorder import Books
from .client_disconnect import ClientWatch
from .dispatch.backend import Call, Route
from .dispatch.call_summary import answer_error
from .dispatch.invoker import Invoker
from .dispatch.response_relay import Answers, Cut
from .dispatch.slots import Seating
from .router import RouteTable
from .websockets import Sockets

log = logging.getLogger(__name__)

CLIENT_GONE = 499


class Gateway:
    def __init__(
        self,
        gateway: str,
        state: StateSync,
        ledger: LedgerWriter,
        billing: BudgetWatch,
        *,
        max_body_bytes: int,
        demand: Callable[[], None],
        freed: Callable[[], None],
    ) -> None:
        """`demand` is told when a call must wait, `freed` when others should hear soon that calls have ended."""
        self.id = gateway
        self._view = state.view
        self._billing = billing
        prospects = Prospects(state.view)
        waits = Waits(gateway, state.view, prospects)
        self._table = RouteTable(gateway, state, prospects, waits)
        self._books = Books(gateway, state.view, ledger, freed=freed)
        self._doorkeeper = Doorkeeper(gateway, state.view, billing, waits, max_body_bytes=max_body_bytes, demand=demand)
        self._session = open_session()
        seating = Seating(
            demand=demand,
            turned_away=self._doorkeeper.turned_away,
            waited_out=self._doorkeeper.waited_out,
            order_of=self._view.orders.get,
        )
        answers = Answers(seating, book=self._books.book, final_status=self._table.final_status)
        self._invoker = Invoker(self._session, seating, answers, final_status=self._table.final_status)
        self._sockets = Sockets(self._table, self._books, self._doorkeeper, seating, self._session, billing)

    async def close(self) -> None:
        await self._session.close()

    def report(self) -> GatewayReport:
        return self._table.report()

    def published(self) -> None:
        self._table.published()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._sockets(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def check(self, target: Target, request_id: str, body_bytes: int) -> None:
        """Errors: what a call would be refused with whenever its turn came, for one that is to be run later."""
        self._doorkeeper.check(await self._table.find(target, request_id), body_bytes)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted_ns, accepted_unix_ns = time.monotonic_ns(), time.time_ns()
        request_id = sane_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        try:
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            route = await self._table.find(target, request_id)
            terms = self._doorkeeper.admit(route, scope)
        except FleetError as refusal:
            await refuse_unread(scope, receive, send, refusal, request_id)
            return
        body = b""
        try:
            price = self._billing.price(accepted_unix_ns // 1_000_000)
            async with asyncio.timeout(terms.timeout_s):
                body = await read_body(scope, receive, terms.max_body_bytes, own=bool(route.spec.max_body_bytes))
            self._doorkeeper.took(len(body))
            headers = request_headers(scope["headers"])
            if PROGRESS in scope:
                headers.append((PROGRESS_HEADER, "1"))
            call = Call(
                id=InvocationId(request_id),
                method=scope["method"],
                target=target.rest,
                headers=headers,
                body=body,
                accepted_ns=accepted_ns,
                accepted_unix_ns=accepted_unix_ns,
                deadline_ns=accepted_ns + round(terms.timeout_s * 1e9),
                queue_ends_ns=accepted_ns + round(terms.queue_s * 1e9) if terms.queue_s is not None else 0,
                price=price,
                key=scope.get("fs.key", ""),
            )
            # While the body came, a route that nobody seemed to need may have been forgotten.
            await self._serve(self._table.open(route.key, route.record), call, receive, send)
        except ClientGone:
            return
        except TimeoutError:
            error = DeadlineExceeded("the request's body did not arrive within the call's time")
            await refuse_unread(scope, receive, send, error, request_id)
        except FleetError as refusal:
            await refuse_unread(scope, receive, send, refusal, request_id)
        finally:
            self._doorkeeper.leave(terms, len(body))

    async def _serve(self, route: Route, call: Call, receive: Receive, send: Send) -> None:
        self._books.open(route, call)
        watch = ClientWatch(call, receive)
        limit = asyncio.timeout(max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9))
        try:
            async with limit:
                await self._invoker.run(route, call, send)
        except TimeoutError:
            await self._end_badly(route, call, self._late(route, call), send)
        except Cut as cut:
            self._books.leave(route, call, waive=True)
            await self._end_badly(route, call, cut.error, send)
        except FleetError as error:
            await self._end_badly(route, call, error, send)
        except asyncio.CancelledError:
            call.status, call.error = CLIENT_GONE, "client_gone"
            self._books.leave(route, call, waive=False)
            if not watch.gone:
                call.status, call.error = 503, Unavailable.code
                raise
            watch.absolve()
        except Exception as error:
            log.exception("a call failed in the gateway", extra={"invocation": call.id})
            await self._end_badly(route, call, FleetError(f"{type(error).__name__} in the gateway"), send)
        finally:
            watch.stop()
            self._books.close(route, call)

    async def _end_badly(self, route: Route, call: Call, error: FleetError, send: Send) -> None:
        self._books.end_badly(route, call, error)
        await answer_error(route, call, error, send)

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
