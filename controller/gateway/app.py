"""The data plane's ASGI app: `ANY /fn/{name}[@{version}][/path...]`.

Reads a request once admission control has let it in, keeps its deadline, notices a client that disconnects, and answers
with an error what went wrong. Which worker a call runs on, and how often it is tried, is for `dispatch`. The hot path
creates no task and touches no Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from fleetstart.runtime.contract.billing.ledger import CLIENT_GONE
from fleetstart.runtime.contract.errors import DeadlineExceeded, FleetError, Unavailable
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.ids import InvocationId, Version, new_invocation_id
from fleetstart.runtime.contract.node.reports import GatewayReport
from fleetstart.runtime.contract.worker_headers import PROGRESS_HEADER

from ..billing.budget_watch import BudgetWatch
from ..billing.ledger_writer import LedgerWriter
from ..http.asgi import Receive, Scope, Send, respond_error
from ..http.body_budget import BodyBudget
from ..http.client import open_session
from ..http.headers import request_headers, valid_request_id
from ..http.invoke_url import Target, parse_target
from ..http.keyed_call import KEYED_CALL, KeyedCall, NotAttached
from ..http.request_body import ClientDisconnected, header, read_body, reject_unread
from ..http.scope import CALL_ORIGIN, GIVEN_REQUEST_ID, REPEAT_KEY, STORED_CALL, CallOrigin, StoredCall
from ..scheduler.quotas.limits import used_up
from ..state.sync import StateSync
from .admission.admission import AdmissionControl
from .admission.feasibility import FeasibilityCheck
from .admission.wait_predictor import WaitPredictor
from .dispatch.call_endings import CallEndings
from .dispatch.call_record import CLIENT_CLOSED_REQUEST, CallRecord, CallRecorder
from .dispatch.call_response import send_error
from .dispatch.dispatcher import Dispatcher, SlotAcquirer
from .dispatch.errors import ResponseTruncated
from .dispatch.grants import Grants
from .dispatch.version_backend import NO_CALL, Call
from .node_links import NodeLinks
from .router import Router
from .websockets import WebSocketProxy

log = logging.getLogger(__name__)

WATCH_AFTER_S = 0.05
"""Calls that take longer are watched for a disconnect; shorter ones end before it would matter."""


class Gateway:
    """The gateway of one controller: its router, admission control and dispatch."""

    def __init__(
        self,
        gateway: str,
        state: StateSync,
        ledger: LedgerWriter,
        billing: BudgetWatch,
        links: NodeLinks,
        *,
        max_body_bytes: int,
        report_now: Callable[[], None],
        report_soon: Callable[[], None],
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        """`report_now` and `report_soon` let the schedulers know that calls wait or run, or that calls have ended.
        `session` reaches the workers; by default it is opened here."""
        self.id = gateway
        self._view = state.view
        self._billing = billing
        feasibility = FeasibilityCheck(state.view)
        wait_predictor = WaitPredictor(gateway, state.view, feasibility)
        self._router = Router(gateway, state, feasibility, wait_predictor)
        self._recorder = CallRecorder(gateway, state.view, ledger, report_now=report_now, report_soon=report_soon)
        self._admission = AdmissionControl(
            gateway, state.view, billing, wait_predictor, max_body_bytes=max_body_bytes, report_now=report_now
        )
        self._session = session if session is not None else open_session()
        slots = SlotAcquirer(
            report_now=report_now,
            queue_full=self._admission.queue_full,
            queue_timeout=self._admission.queue_timeout,
            status_of=self._router.status_of,
        )
        self._dispatcher = Dispatcher(self._session, links, slots, final_status=self._router.final_status)
        self._endings = CallEndings(self._session, links)
        self._websockets = WebSocketProxy(
            self._router,
            self._recorder,
            self._admission,
            slots,
            self._session,
            links,
            billing,
            self._endings,
            final_status=self._router.final_status,
        )

    @property
    def grants(self) -> Grants:
        """The grants of running calls whose functions may call others."""
        return self._recorder.grants

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP client that reaches workers."""
        return self._session

    @property
    def bodies(self) -> BodyBudget:
        return self._admission.bodies

    def stop(self) -> None:
        """Calls whose clients have left are waited for no longer: the controller shuts down."""
        self._endings.stop()

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
            await self._handle(scope, receive, send)

    async def check(self, target: Target, request_id: str, body_bytes: int) -> Version:
        """Checks a call that is to run later, and returns the version to which it would go now. Errors: those with
        which it would be rejected whenever it came."""
        backend = await self._router.find(target, request_id)
        self._admission.check(backend, body_bytes)
        return backend.key.version

    async def require_function(self, target: Target, request_id: str) -> Version:
        """The first version of a call's function, by which it is told from an earlier one of that name. Errors:
        NotFound, if there is no such function or version."""
        backend = await self._router.find(target, request_id)
        record = self._view.functions.get(target.name)
        return record.first if record is not None else backend.key.version

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted_ns, accepted_unix_ns = time.monotonic_ns(), time.time_ns()
        request_id = valid_request_id(header(scope, b"x-request-id")) or new_invocation_id()
        try:
            target = parse_target(scope["path"], scope.get("raw_path") or b"", scope["query_string"])
            keyed: KeyedCall | None = scope.get(KEYED_CALL)
            if keyed is not None and keyed.version is not None:
                target = target._replace(version=keyed.version)
            stored: StoredCall | None = scope.get(STORED_CALL)
            accepted = stored.version if stored is not None else None
            backend = await self._router.find(target, request_id, accepted=accepted)
            limits = self._admission.admit(backend, scope)
        except FleetError as refusal:
            await reject_unread(scope, receive, send, refusal, request_id)
            return
        held = self.bodies.open()
        try:
            price = self._billing.price(accepted_unix_ns // 1_000_000)
            async with asyncio.timeout(limits.timeout_s):
                own = bool(backend.spec.max_body_bytes)
                body = await read_body(scope, receive, limits.max_body_bytes, held=held, own=own)
            headers = request_headers(scope)
            if stored is not None:
                headers.append((PROGRESS_HEADER, "1"))
            origin: CallOrigin | None = scope.get(CALL_ORIGIN)
            call = Call(
                id=InvocationId(request_id),
                method=scope["method"],
                target=target.rest,
                headers=headers,
                body=body,
                accepted_ns=accepted_ns,
                accepted_unix_ns=accepted_unix_ns,
                deadline_ns=accepted_ns + round(limits.timeout_s * 1e9),
                queue_ends_ns=_queue_ends_ns(accepted_ns, limits.queue_s, stored),
                price=price,
                key=scope.get("fs.key", ""),
                root=target.root,
                parent=origin.parent if origin is not None else NO_CALL,
                chain=origin.chain if origin is not None else (),
                repeat_key=scope.get(REPEAT_KEY, ""),
                request_id=scope.get(GIVEN_REQUEST_ID, ""),
                keyed=keyed,
                stored=stored,
            )
            # While the body came, a backend without calls may have been forgotten.
            backend = self._router.open(backend.key, backend.record)
            await self._serve(self._recorder.open(backend, call), receive, send)
        except ClientDisconnected:
            return
        except TimeoutError:
            error = DeadlineExceeded("the request's body did not arrive within the call's time")
            await reject_unread(scope, receive, send, error, request_id)
        except FleetError as refusal:
            await reject_unread(scope, receive, send, refusal, request_id)
        finally:
            held.release()
            self._admission.release(limits)

    async def _serve(self, record: CallRecord, receive: Receive, send: Send) -> None:
        disconnect, followed = DisconnectWatch(record, receive), False
        left_s = (record.call.deadline_ns - time.monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self._dispatcher.run(record, send)
        except NotAttached:
            record.hand_over()
            raise
        except TimeoutError:
            await self._fail(record, self._deadline_exceeded(record), send)
        except ResponseTruncated as truncated:
            record.release(waive=truncated.lost_ns is None, until_ns=truncated.lost_ns)
            await self._fail(record, truncated.error, send)
        except FleetError as error:
            await self._fail(record, error, send)
        except asyncio.CancelledError:
            if not disconnect.seen:
                if record.call.keyed is not None:
                    record.hand_over()
                    await _refuse_handed_over(record, send)
                else:
                    await self._fail(record, _drain_timeout(record), send)
                raise
            disconnect.clear_cancellation()
            if record.attaches:
                record.hand_over()
            if record.call.stored is not None and record.call.stored.handed_back:
                record.fail(_drain_timeout(record))
            else:
                record.set_outcome(CLIENT_CLOSED_REQUEST, CLIENT_GONE)
                if followed := record.call.stored is not None:
                    await self._endings.follow(record)
                else:
                    await self._endings.wait(record)
        except Exception as error:
            log.exception("a call failed in the gateway", extra={"invocation": record.call.id})
            await self._fail(record, FleetError(f"{type(error).__name__} in the gateway"), send)
        finally:
            disconnect.stop()
            if not followed:
                record.close()

    async def _fail(self, record: CallRecord, error: FleetError, send: Send) -> None:
        """Errors: NotAttached, for a call that is another gateway's."""
        if record.attaches:
            record.hand_over()
            raise NotAttached(error)
        record.fail(error)
        await send_error(record, error, send)

    def _deadline_exceeded(self, record: CallRecord) -> DeadlineExceeded:
        call, key = record.call, record.backend.key
        allowed_s = (call.deadline_ns - call.accepted_ns) / 1e9
        if record.attempt is not None and record.attempt.active:
            where = f"it ran {(time.monotonic_ns() - record.attempt.started_ns) / 1e9:.3g} s on its worker"
            hint = "raise `timeout_s`, or make the handler quicker"
        else:
            failure, project = self._view.failures.get(key), project_of(key.name)
            quota = used_up(self._view, project, record.backend.spec.memory_bytes) if failure is None else ""
            where = "it waited for a worker" + (
                f", whose last start failed: {failure.error.message}" if failure else f": {quota}" if quota else ""
            )
            hint = f"`fs status` and `fs logs {key.name}` show why none was ready"
            if quota:
                hint = f"an admin raises it: fs project quota {project}; or let others have less: fs scale NAME --max"
        return DeadlineExceeded(f"function {key.name}: no answer within {allowed_s:g} s: {where}", hint=hint)


def _queue_ends_ns(accepted_ns: int, queue_s: float | None, stored: StoredCall | None) -> int:
    """Time until which a call may wait for a worker, the sooner of its limits; 0: until its deadline."""
    ends_ns = [accepted_ns + round(queue_s * 1e9)] if queue_s is not None else []
    if stored is not None and stored.queue_ends_ns:
        ends_ns.append(stored.queue_ends_ns)
    return min(ends_ns, default=0)


def _drain_timeout(record: CallRecord) -> Unavailable:
    """The error of a call that the controller's shutdown cancels."""
    return Unavailable(
        f"function {record.backend.key.name}: the controller shuts down, and the call outlived the drain time",
        hint="call again; FS_DRAIN_S sets how long calls may go on after SIGTERM",
    )


async def _refuse_handed_over(record: CallRecord, send: Send) -> None:
    """Answers a keyed call that goes on at its worker; a stream that has begun is cut, for its client to come back."""
    if not record.begun:
        await respond_error(
            send,
            Unavailable(
                f"function {record.backend.key.name}: the controller shuts down, and the call goes on",
                hint="send it again with the same Idempotency-Key",
                retry_after_s=1,
            ),
            record.call.id,
        )


class DisconnectWatch:
    """Cancels a call's task when its client disconnects. Costs a timer; a task only for calls that take a while."""

    def __init__(self, record: CallRecord, receive: Receive) -> None:
        self.seen = False
        self._record = record
        self._receive = receive
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._record.finished and self._task is not None:
            self.seen = True
            self._task.cancel()

    def clear_cancellation(self) -> None:
        """Undoes the cancellation, which was ours and is dealt with."""
        if self._task is not None:
            self._task.uncancel()

    def stop(self) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
