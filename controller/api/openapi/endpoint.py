"""One endpoint of the management API: its route, the permission that it needs, its audit verb, and its types.

The table of all of them is in `endpoints`; routes, permissions and the OpenAPI document are made from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from starlette.routing import BaseRoute, Route, WebSocketRoute

from ...auth.route_rules import SOCKET, Kind, Permission, RouteRule

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    """`SOCKET` for a WebSocket."""
    path: str
    """Path in starlette's syntax: `/api/v1/objects/{key:path}`."""
    permission: Permission
    handler: Callable[..., Awaitable[Any]]
    """An unbound method of the class under which the table lists the endpoint."""
    summary: str
    audit: str = field(default="", kw_only=True)
    """Verb in the audit log. Empty: nothing is changed, or nothing that is worth a row."""
    kind: Kind = field(default="", kw_only=True)
    """Kind of the object that the path names."""
    unlimited: bool = field(default=False, kw_only=True)
    """True if a key for one project or for some functions is rejected."""
    before_sync: bool = field(default=False, kw_only=True)
    """True if it is served before Redis was read for the first time, without keys."""
    query: Mapping[str, str | int | type[int]] = field(default_factory=dict, kw_only=True)
    """Query parameters with their defaults, which give their types; `int` itself: no fixed default."""
    headers: tuple[str, ...] = field(default=(), kw_only=True)
    """Request headers that it reads, beyond those of HTTP."""
    body: Any = field(default=None, kw_only=True)
    """Type of the JSON body: a struct, a list of one, or one or None. None: no body, or bytes."""
    answer: Any = field(default=None, kw_only=True)
    """Type of the response: as `body`, or `dict`, `str`, `bytes`; a union lists alternatives."""
    status: int = field(default=200, kw_only=True)
    media: str = field(default=JSON, kw_only=True)
    documented: bool = field(default=True, kw_only=True)
    """True if the OpenAPI document has it."""

    def route(self, api: object) -> BaseRoute:
        """The starlette route, its handler bound to `api`. A WebSocket's `api` is an ASGI app itself."""
        if self.method == SOCKET:
            assert callable(api)
            return WebSocketRoute(self.path, api)
        return Route(self.path, MethodType(self.handler, api), methods=[self.method])

    def rule(self) -> RouteRule:
        return RouteRule(
            self.method,
            self.path,
            self.permission,
            verb=self.audit,
            kind=self.kind,
            unlimited=self.unlimited,
            before_sync=self.before_sync,
        )
