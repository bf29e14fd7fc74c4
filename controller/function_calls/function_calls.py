"""Calls from function to function: checks one against the grant it came with, and runs it as any other call.

A worker proves nothing and is believed nothing: the grant names the running call, and from the gateway's own record of
that come the caller's function and project, the key that is billed, the deadline, the trace, and the functions above.
The call then passes the layers of a client's call, so that limits, budgets, queues, retries and the ledger hold for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import quote, unquote

import aiohttp
import msgspec

from fleetstart.runtime.contract.errors import CallEnded, FleetError, Unavailable
from fleetstart.runtime.contract.function.names import full_name
from fleetstart.runtime.contract.function_calls import BROKEN, COMPLETE, CallRequest
from fleetstart.runtime.contract.ids import LIVE, InvocationId, WorkerId, new_invocation_id
from fleetstart.runtime.contract.worker_headers import DEPTH_HEADER, ERROR_HEADER, AnswerHead

from ..async_invocations.idempotency.response_recorder import replay_receive
from ..auth.quotas import ProjectRateLimiter
from ..gateway.dispatch.grants import Grant, Grants
from ..gateway.node_links import NodeLinks
from ..http.asgi import Message, Receive, Scope, Send, respond_error
from ..http.invoke_url import PREFIX
from ..http.scope import API_KEY_NAME, CALL_ORIGIN, CALLER_IDENTITY, CallerIdentity, CallOrigin
from ..state.view import View
from .rules import call_headers, caller_of, check_chain, check_declared, check_request, repeat_key, time_left_s
from .worker_links import Socket, WorkerLinks

log = logging.getLogger(__name__)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class FunctionCalls:
    """The calls that functions make through one gateway."""

    def __init__(
        self,
        gateway: str,
        grants: Grants,
        session: aiohttp.ClientSession,
        node_links: NodeLinks,
        view: View,
        app: App,
        rates: ProjectRateLimiter,
        *,
        max_body_bytes: int,
    ) -> None:
        """`app` serves a call from its request id on; `rates` counts calls against the quotas of projects."""
        self._grants = grants
        self._view = view
        self._app = app
        self._rates = rates
        self._links = WorkerLinks(gateway, grants, session, node_links, self._serve, max_body_bytes=max_body_bytes)
        grants.on_issue = self._links.keep_spare

    async def close(self) -> None:
        await self._links.close()

    async def _serve(self, worker: WorkerId, socket: Socket, request: CallRequest, body: bytes) -> None:
        """Serves one call. What fails before it is accepted is answered as an error."""
        started_ns = time.monotonic_ns()
        gone = asyncio.Event()
        answer = LinkAnswer(socket, gone)
        call_id = new_invocation_id()
        grant = self._grants.find(request.grant, worker)
        try:
            if grant is None:
                raise CallEnded(
                    f"function {request.function[:80]} was not called: the call for which it would be has ended"
                )
            scope = self._scope(grant, request, body, call_id)
        except FleetError as error:
            depth = len(grant.record.call.chain) + 1 if grant is not None else 0
            await respond_error(answer.send, error, call_id, [(DEPTH_HEADER.encode(), b"%d" % depth)])
            await answer.close()
            return
        closed = asyncio.create_task(_until_closed(socket, gone))
        grant.on_end.add(gone.set)
        try:
            await self._app(scope, replay_receive(body, gone), answer.send)
        except Exception:
            log.exception("a call of a function failed in the gateway", extra={"invocation": call_id})
        finally:
            grant.on_end.discard(gone.set)
            closed.cancel()
        grant.record.called(answer.id or call_id, request.function, answer.status, answer.error, started_ns)
        if not answer.status:
            await respond_error(answer.send, _no_answer(request.function, ended=gone.is_set()), call_id)
        await answer.close()

    def _scope(self, grant: Grant, request: CallRequest, body: bytes, call_id: InvocationId) -> Scope:
        """The request as a client's would be. Errors: InvalidInput, CallNotDeclared, CallLoop, NotFound, RateLimited,
        DeadlineExceeded."""
        call, spec = grant.record.call, grant.record.backend.spec
        name = grant.record.backend.key.name
        callee = full_name(request.function, spec.home)
        check_request(request)
        check_declared(spec, callee)
        chain = (*call.chain, name)
        check_chain(chain, callee)
        caller = caller_of(spec)
        caller.require_right("invoke", "calling functions")
        caller.require_existing(callee, self._view.functions)
        left_s = time_left_s(callee, call.deadline_ns, request.timeout_s, time.monotonic_ns())
        self._take_rate(caller.project)
        headers = call_headers(request, grant.context)
        headers.append((b"x-request-id", call_id.encode()))
        headers.append((b"fs-timeout-s", b"%.6f" % left_s))
        headers.append((b"content-length", b"%d" % len(body)))
        if call.repeat_key and not any(key == b"idempotency-key" for key, _ in headers):
            headers.append((b"idempotency-key", repeat_key(call.repeat_key, name, request, body).encode()))
        path, _, query = request.path.partition("?")
        version = f"@{quote(request.version, safe='')}" if request.version != LIVE else ""
        raw_path = f"{PREFIX}{quote(callee, safe='')}{version}{path}"
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(raw_path),
            "raw_path": raw_path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            CALLER_IDENTITY: CallerIdentity(project=caller.project, key=call.key),
            CALL_ORIGIN: CallOrigin(parent=call.id, chain=chain),
            **({API_KEY_NAME: call.key} if call.key else {}),
        }

    def _take_rate(self, project: str) -> None:
        rate = self._view.access.rates.get(project)
        if rate is not None:
            self._rates.take(project, rate, len(self._view.gateways), time.monotonic_ns())


class LinkAnswer:
    """An ASGI `send` that sends the response over a link, and notes how it began."""

    def __init__(self, socket: Socket, gone: asyncio.Event) -> None:
        self._socket = socket
        self._gone = gone
        self._whole = False
        self.status = 0
        self.error = ""
        self.id = ""
        """Request id of the call that answered: an earlier one's, if a repeated call got its answer."""

    async def send(self, message: Message) -> None:
        try:
            if message["type"] == "http.response.start":
                await self._socket.send_str(self._head(message))
            else:
                if piece := message.get("body", b""):
                    await self._socket.send_bytes(piece)
                self._whole = not message.get("more_body", False)
        except (aiohttp.ClientError, ConnectionError):
            self._gone.set()  # as with a client that has gone, what is sent from now on goes nowhere

    async def close(self) -> None:
        await self._socket.close(code=COMPLETE if self._whole else BROKEN)

    def _head(self, message: Message) -> str:
        self.status = message["status"]
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())]
        self.error = next((value for name, value in headers if name == ERROR_HEADER), "")
        self.id = next((value for name, value in headers if name == "x-request-id"), "")
        return msgspec.json.encode(AnswerHead(status=self.status, headers=headers)).decode()


async def _until_closed(socket: Socket, gone: asyncio.Event) -> None:
    """Waits for the worker's side: it sends nothing any more, and closes to cancel."""
    await socket.receive()
    gone.set()


def _no_answer(function: str, *, ended: bool) -> FleetError:
    if ended:
        return CallEnded(f"function {function} was cancelled: the call for which it was called has ended")
    return Unavailable(f"function {function} was not answered by the gateway", retry_after_s=1)
