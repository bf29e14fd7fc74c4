"""ASGI middleware before gateway and management API: authenticates, authorizes, rate-limits, and writes the audit log.

A request needs a key with the right that its route demands. In a system that was started without keys (`fs up --open`),
requests over loopback pass until there is one. `/healthz` and the dashboard's files, which hold no data, are open.
Decisions use the view alone: no request waits for Redis here. A function's name in a path becomes its full name, the
only one that anything behind this knows. A change is written to the audit log before its response goes out, a rejection
a little later.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import urlsplit

from fleetstart.runtime.contract.errors import FleetError, Forbidden, Unauthorized, Unavailable
from fleetstart.runtime.contract.function.names import project_of

from ..http.asgi import Message, RawHeaders, Receive, Scope, Send
from ..http.invoke_url import PREFIX, parse_target, with_full_name
from ..http.json_api import now_unix_ms
from ..http.request_body import header, reject_unread
from ..http.scope import (
    API_CALLER,
    API_KEY_NAME,
    AUDITED_ACTION,
    CALLER_IDENTITY,
    ORIGIN_ALLOWED,
    CallerIdentity,
)
from ..http.websocket import SWITCHING_PROTOCOLS, reject_handshake
from ..schemas.access import AuditEvent
from ..state.access_records import DEFAULT, LOCAL, digest
from ..state.view import View
from .audit_journal import UNKNOWN
from .audit_log import AuditLog, RejectedRequest
from .authorize import Caller, authenticate, is_fleetstart_key, key_in_headers, local_caller
from .lookups import object_snapshot
from .quotas import ProjectRateLimiter
from .request_context import AuditedAction
from .route_rules import SOCKET, RoutePermission, RouteRules

log = logging.getLogger(__name__)

OWN_HEADER = b"fs-key"
OBJECT_MAX = 200
"""Characters of an object's name in the audit log: more than any valid name has."""
ADDRESS_MAX = 64
"""Characters of an address in the audit log: more than any has, but a proxy may tell anything."""
_CHALLENGE: RawHeaders = [(b"www-authenticate", b'Bearer realm="fleetstart"')]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AuthMiddleware:
    def __init__(
        self, app: App, view: View, audit: AuditLog, rules: RouteRules, *, loopback: bool, is_open: bool
    ) -> None:
        """`loopback`: whether only this machine reaches the listening socket. `is_open`: whether requests over it pass
        as long as there are no keys."""
        self._app = app
        self._view = view
        self._audit = audit
        self._rules = rules
        self._loopback = loopback
        self._open = loopback and is_open
        self.rates = ProjectRateLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        invoke = scope["type"] != "lifespan" and scope["path"].startswith(PREFIX)
        if not invoke and (scope["type"] == "lifespan" or self._rules.is_open(scope["path"])):
            await self._app(scope, receive, send)
            return
        table = self._view.access
        unlocked = self._open and self._view.synced and not table.locked
        if invoke and unlocked and not table.rates and self._is_local(scope) and not _foreign_site(scope):
            _write_full_name(scope, DEFAULT)
            await self._app(scope, receive, send)
            return
        by = ""
        try:
            caller = self._caller(scope)
            by = caller.name
            permission = self._authorize_request(scope, caller) if not invoke else None
            if invoke:
                self._authorize_call(scope, caller)
        except FleetError as error:
            self._audit.record_rejection(self._rejected(scope, error, by))
            await _reject(scope, receive, send, error)
            return
        if caller.key is not None:
            scope[API_KEY_NAME] = caller.name
            scope["headers"] = _without_key(scope["headers"])
            self._audit.record_use(caller.name, now_unix_ms())
        scope[API_CALLER] = caller
        if permission is None or not permission.verb:
            await self._app(scope, receive, send)
        else:
            await self._audited(scope, receive, send, caller, permission)

    # ── authentication and authorization ───────────────────────────────────────────────────────────

    def _caller(self, scope: Scope) -> Caller:
        """Authenticates the request. Errors: Unauthorized, Unavailable, Forbidden."""
        table = self._view.access
        if table.locked:
            text = key_in_headers(header(scope, b"authorization"), header(scope, OWN_HEADER))
            record = authenticate(table, text, now_unix_ms())
            return Caller(name=record.name, key=record)
        if not self._view.synced and scope["path"] not in self._rules.before_sync:
            raise Unavailable("keys are not known yet, Redis was not read", retry_after_s=1)
        if not self._is_local(scope):
            raise Unauthorized(
                "there are no keys yet, and without them only this machine itself may call",
                hint="run there: fs key create admin --scope admin",
            )
        if not self._open and self._view.synced:
            raise Unavailable("the first key is not created yet", hint="see the controller's log", retry_after_s=1)
        _reject_other_sites(scope)
        return local_caller()

    def _is_local(self, scope: Scope) -> bool:
        client = scope.get("client")
        return self._loopback and (client is None or is_loopback(client[0]))

    def _authorize_call(self, scope: Scope, caller: Caller) -> None:
        """Authorizes a function call. Errors: Forbidden, NotFound, RateLimited."""
        _write_full_name(scope, caller.home)
        name = parse_target(scope["path"], scope.get("raw_path") or b"", b"").name
        caller.require_right("invoke", "calling functions")
        if caller.limited:
            caller.require_existing(name, self._view.functions)
        project = project_of(name)
        if caller.key is not None:
            scope[CALLER_IDENTITY] = CallerIdentity(project=project, key=caller.name)
        rate = self._view.access.rates.get(project)
        if rate is not None and name in self._view.functions:
            self.rates.take(project, rate, len(self._view.gateways), time.monotonic_ns())

    def _authorize_request(self, scope: Scope, caller: Caller) -> RoutePermission:
        """Authorizes a request of the management API. Errors: Forbidden, NotFound."""
        permission = self._rules.permission_of(_method(scope), scope["path"])
        if permission.right is not None:
            caller.require_right(permission.right, permission.what)
        if permission.unlimited:
            caller.require_unlimited(permission.what)
        if permission.function:
            full = caller.full_name(permission.function)
            scope["path"] = permission.path_with(scope["path"], full)
            permission = replace(permission, name=full)
            if caller.limited:
                caller.require_existing(full, self._view.functions)
        return permission

    def _rejected(self, scope: Scope, error: FleetError, by: str) -> RejectedRequest:
        """Describes a rejection for the audit log."""
        path = scope["path"]
        if path.startswith(PREFIX):
            verb, name = "invoke", f"function {parse_target(path, b'', b'').name}"
        else:
            permission = self._rules.permission_of(_method(scope), path)
            verb, name = permission.verb or "read", f"{permission.kind} {permission.name}".strip() or path
        return RejectedRequest(by, _address(scope), verb, name[:100], error.status, error.code)

    # ── the audit log ──────────────────────────────────────────────────────────────────────────────

    async def _audited(
        self, scope: Scope, receive: Receive, send: Send, caller: Caller, permission: RoutePermission
    ) -> None:
        action = scope[AUDITED_ACTION] = AuditedAction(permission.verb, permission.kind, permission.name)
        before = object_snapshot(self._view)
        ended = False

        def event(status: int, code: str, after: str = "") -> AuditEvent:
            return AuditEvent(
                unix_ms=now_unix_ms(),
                by=caller.name,
                address=_address(scope),
                verb=action.verb,
                object=f"{action.kind} {action.name}".strip()[:OBJECT_MAX],
                status=status,
                code=code,
                before=action.before or digest(before(action.kind, action.name)),
                after=action.after or after,
            )

        number = self._audit.begin(event(0, UNKNOWN))

        async def sending(message: Message) -> None:
            nonlocal ended
            status = _status_in(message)
            if status:
                ended = True
                after = digest(object_snapshot(self._view)(action.kind, action.name))
                await self._audit.end(number, event(status, _error_code(message), after))
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if not ended:  # nobody was answered
                await self._audit.end(number, event(0, UNKNOWN))


def _write_full_name(scope: Scope, project: str) -> None:
    """Writes the full name of the called function into the path; a name without one is in `project`."""
    scope["path"], scope["raw_path"] = with_full_name(
        scope["path"], scope.get("raw_path") or scope["path"].encode(), project
    )


def is_loopback(host: str) -> bool:
    if host == "127.0.0.1":
        return True  # nearly always: no parsing needed
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _reject_other_sites(scope: Scope) -> None:
    """Rejects cross-site requests and foreign host names (DNS rebinding). Without keys, a web page open in a browser of
    this machine could deploy, or call functions, otherwise. Errors: Forbidden."""
    if site := _foreign_site(scope):
        raise Forbidden(
            f"requests from {site[:80]} are not taken as long as there are no keys",
            hint="with one they are, if they show it: fs key create admin --scope admin; "
            "a function's setting `cors` names pages that may call it",
        )


def _foreign_site(scope: Scope) -> str:
    """The other site that a request names as its page's origin or as its host; empty if none. Pages that the function's
    `cors` allows are no other site."""
    origin, host = header(scope, b"origin"), header(scope, b"host")
    page = origin.decode("latin-1") if origin and ORIGIN_ALLOWED not in scope else ""
    for text in (page, f"//{host.decode('latin-1')}" if host else ""):
        name = _hostname(text)
        if text and not _is_own(name):
            return name or text
    return ""


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_own(host: str) -> bool:
    """Checks whether the host is an address or localhost. An address cannot be a foreign name that resolves to it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return True


def _without_key(headers: RawHeaders) -> RawHeaders:
    return [
        (name, value)
        for name, value in headers
        if name != OWN_HEADER and not (name == b"authorization" and is_fleetstart_key(value))
    ]


async def _reject(scope: Scope, receive: Receive, send: Send, error: FleetError) -> None:
    request_id = (header(scope, b"x-request-id") or b"").decode("latin-1")
    challenge = _CHALLENGE if isinstance(error, Unauthorized) else []
    if scope["type"] == "websocket":
        await receive()
        await reject_handshake(send, error, request_id, challenge)
        return

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *challenge]
        await send(message)

    await reject_unread(scope, receive, sending, error, request_id)


def _error_code(message: Message) -> str:
    return next((value.decode() for name, value in message.get("headers", ()) if name == b"fs-error"), "")


def _method(scope: Scope) -> str:
    """The request's method; `SOCKET` for a WebSocket's handshake, which is a GET with other effects."""
    return SOCKET if scope["type"] == "websocket" else str(scope["method"])


def _status_in(message: Message) -> int:
    """The status if the message begins a response, else 0."""
    if message["type"] == "websocket.accept":
        return SWITCHING_PROTOCOLS
    if message["type"] in ("http.response.start", "websocket.http.response.start"):
        return int(message["status"])
    return 0


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0])[:ADDRESS_MAX] if client else LOCAL
