"""The door for invocations: `ANY /fn/{name}[@{version}][/path...]`, as a bare ASGI app.

Reads the request once the admission lets it in, keeps its deadline, notices a client that leaves, and answers for what
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
from ..http.headers import request_headers, valid_request_id
from ..http.invoke_url import Target, parse_target
from ..http.request_body import ClientDisconnected, header, read_body, reject_unread
from ..http.scope import PROGRESS
from ..state.sync import StateSync
from .admission.admission import AdmissionControl
from .admission.feasibility import FeasibilityCheck
from .admission.wait_predictor import WaitPredictor
from .call_recorder import CallRecorder
from .client_disconnect import DisconnectWatch
from .dispatch.backend import Call, VersionBackend
from .dispatch.call_summary import answer_error
from .dispatch.dispatcher import Dispatcher
from .dispatch.response_relay import ResponseRelay, ResponseTruncated
from .dispatch.slots import SlotAcquirer
from .router import Router
from .websockets import WebSocketProxy

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


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
        feasibility = FeasibilityCheck(state.view)
        wait_predictor = WaitPredictor(gateway, state.view, feasibility)
        self._router = Router(gateway, state, feasibility, wait_predictor)
        self._recorder = CallRecorder(gateway, state.view, ledger, freed=freed)
        self._admission = AdmissionControl(
            gateway, state.view, billing, wait_predictor, max_body_bytes=max_body_bytes, demand=demand
        )
        self._session = open_session()
        slots = SlotAcquirer(
            demand=demand,
            queue_full=self._admission.queue_full,
            queue_timeout=self._admission.queue_timeout,
            order_of=self._view.orders.get,
        )
        relay = ResponseRelay(slots, record=self._recorder.record, final_status=self._router.final_status)
        self._invoker = Dispatcher(self._session, slots, relay, final_status=self._router.final_status)
        self._websockets = WebSocketProxy(self._router, self._recorder, self._admission, slots, self._session, billing)

    async def close(self) -> None:
        await self._session.close()

    def report(self) -> GatewayReport:
        return self._router.report()

    def published(self) -> None:
        self._router.published()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websockets(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def check(self, target: Target, request_id: str, body_bytes: int) -> None:
        """Errors: what a call would be refused with whenever its turn came, for one that is to be run later."""
        self._admission.check(await self._router.find(target, request_id), body_bytes)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted_ns, accepted_unix_ns = time.monotonic_ns(), time.time_ns()
        request_id = valid_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        try:
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            backend = await self._router.find(target, request_id)
            limits = self._admission.admit(backend, scope)
        except FleetError as refusal:
            await reject_unread(scope, receive, send, refusal, request_id)
            return
        body = b""
        try:
            price = self._billing.price(accepted_unix_ns // 1_000_000)
            async with asyncio.timeout(limits.timeout_s):
                body = await read_body(scope, receive, limits.max_body_bytes, own=bool(backend.spec.max_body_bytes))
            self._admission.took(len(body))
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
                deadline_ns=accepted_ns + round(limits.timeout_s * 1e9),
                queue_ends_ns=accepted_ns + round(limits.queue_s * 1e9) if limits.queue_s is not None else 0,
                price=price,
                key=scope.get("fs.key", ""),
            )
            # While the body came, a backend that nobody seemed to need may have been forgotten.
            await self._serve(self._router.open(backend.key, backend.record), call, receive, send)
        except ClientDisconnected:
            return
        except TimeoutError:
            error = DeadlineExceeded("the request's body did not arrive within the call's time")
            await reject_unread(scope, receive, send, error, request_id)
        except FleetError as refusal:
            await reject_unread(scope, receive, send, refusal, request_id)
        finally:
            self._admission.leave(limits, len(body))

    async def _serve(self, backend: VersionBackend, call: Call, receive: Receive, send: Send) -> None:
        self._recorder.open(backend, call)
        watch = DisconnectWatch(call, receive)
        limit = asyncio.timeout(max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9))
        try:
            async with limit:
                await self._invoker.run(backend, call, send)
        except TimeoutError:
            await self._fail(backend, call, self._late(backend, call), send)
        except ResponseTruncated as cut:
            self._recorder.detach(backend, call, waive=True)
            await self._fail(backend, call, cut.error, send)
        except FleetError as error:
            await self._fail(backend, call, error, send)
        except asyncio.CancelledError:
            call.status, call.error = CLIENT_CLOSED_REQUEST, "client_gone"
            self._recorder.detach(backend, call, waive=False)
            if not watch.gone:
                call.status, call.error = 503, Unavailable.code
                raise
            watch.clear_cancellation()
        except Exception as error:
            log.exception("a call failed in the gateway", extra={"invocation": call.id})
            await self._fail(backend, call, FleetError(f"{type(error).__name__} in the gateway"), send)
        finally:
            watch.stop()
            self._recorder.close(backend, call)

    async def _fail(self, backend: VersionBackend, call: Call, error: FleetError, send: Send) -> None:
        self._recorder.record_failure(backend, call, error)
        await answer_error(backend, call, error, send)

    def _late(self, backend: VersionBackend, call: Call) -> DeadlineExceeded:
        allowed_s = (call.deadline_ns - call.accepted_ns) / 1e9
        if call.worker is not None and call in call.worker.calls:
            where = f"it ran {(time.monotonic_ns() - call.dispatched_ns) / 1e9:.3g} s on its worker"
            hint = "raise `timeout`, or make the handler quicker"
        else:
            failure = self._view.failures.get(backend.key)
            where = "it waited for a worker" + (
                f", whose last start failed: {failure.error.message}" if failure else ""
            )
            hint = f"`fs status` and `fs logs {backend.key.name}` tell why none came"
        return DeadlineExceeded(f"function {backend.key.name}: no answer within {allowed_s:g} s: {where}", hint=hint)
