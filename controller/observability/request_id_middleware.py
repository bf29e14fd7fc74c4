"""The outermost middleware of the controller: gives each request its id and its trace context.

A call's id is always the platform's: the ledger bills by it, and one id for many calls would be one bill. The caller's
`X-Request-Id` goes beside it into the row and the log lines. Other requests keep the id that they came with.

Both stand in the request's headers for the layers below and for the worker, and in its context for log lines and
spans. What a client says of a schedule is dropped: the platform alone says it, behind this middleware. Error responses
to calls that reached no worker are counted here by their code, wherever they come from: keys, budgets, queues, sizes,
functions that do not exist. What a layer below raises is a fault of the platform: it is logged, and answered as one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from secrets import token_hex

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.worker_headers import (
    ERROR_HEADER,
    REQUEST_HEADER,
    SCHEDULED_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
)

from ..http.asgi import Message, Receive, Scope, Send, respond_error
from ..http.headers import valid_request_id
from ..http.invoke_url import PREFIX
from ..http.request_context import GIVEN, REQUEST, TRACE, trace_context, traceparent
from ..http.scope import GIVEN_REQUEST_ID

log = logging.getLogger(__name__)

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST = REQUEST_HEADER.encode()
_PARENT = TRACEPARENT_HEADER.encode()
_STATE = TRACESTATE_HEADER.encode()
_ERROR = ERROR_HEADER.encode()
CALL_PREFIX = "inv-"
"""That of `new_invocation_id`."""
REQUEST_PREFIX = "req-"
_OURS = frozenset((_REQUEST, _PARENT, _STATE, SCHEDULED_HEADER.encode()))


class RequestIdMiddleware:
    """Sets the request id and trace context of each request.

    `refused` is called with the code of each error response to a call that reached no worker. `sample`: spans are
    exported.
    """

    def __init__(self, app: App, *, refused: Callable[[str], None], sample: bool) -> None:
        self._app = app
        self._refused = refused
        self._sample = sample

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" not in scope:
            await self._app(scope, receive, send)
            return
        calls = scope["path"].startswith(PREFIX)
        request_id = self._identify(scope, calls=calls)

        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            # A WebSocket may be refused with one, too; good answers of the gateway need nothing.
            if message["type"].endswith("http.response.start") and (not calls or message["status"] >= 400):
                self._inspect(message, request_id, calls=calls)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if scope["type"] != "http":
                raise  # of a send to a client that has left, for example
            log.exception("a request failed in the controller", extra={"path": scope["path"]})
            if started:
                raise
            await respond_error(sending, FleetError(f"{type(error).__name__} in the controller"), request_id)

    def _identify(self, scope: Scope, *, calls: bool) -> str:
        """Puts id and trace context into the request's headers and its context. Returns the id."""
        headers = []
        given: bytes | None = None
        parents: list[bytes] = []
        states: list[bytes] = []
        for pair in scope["headers"]:
            name = pair[0]
            if name not in _OURS:
                headers.append(pair)
            elif name == _REQUEST:
                given = pair[1] if given is None else given
            elif name == _PARENT:
                parents.append(pair[1])
            elif name == _STATE:
                states.append(pair[1])
        chance = token_hex(34)  # once: reading random bytes is most of the work here
        own_id = valid_request_id(given)
        if calls:
            request_id = CALL_PREFIX + chance[48:]
            GIVEN.set(own_id or "")
            if own_id:
                scope[GIVEN_REQUEST_ID] = own_id
        else:
            request_id = own_id or REQUEST_PREFIX + chance[48:]
        parent = parents[0] if len(parents) == 1 else None  # two contradict each other
        context = trace_context(parent, b",".join(states), sample=self._sample, chance=chance)
        headers.append((_REQUEST, request_id.encode()))
        headers.append((_PARENT, traceparent(context)))
        if context.state:
            headers.append((_STATE, context.state.encode()))
        scope["headers"] = headers
        REQUEST.set(request_id)
        TRACE.set(context)
        return request_id

    def _inspect(self, message: Message, request_id: str, *, calls: bool) -> None:
        code, named, started = b"", False, False
        for name, value in message.get("headers", ()):
            if name == _REQUEST:
                named = True
            elif name == _ERROR:
                code = value
            elif name == b"fs-start":
                started = True
        if code and calls and not started:
            self._refused(code.decode("latin-1"))
        if not named:
            message["headers"] = [*message.get("headers", ()), (_REQUEST, request_id.encode())]
