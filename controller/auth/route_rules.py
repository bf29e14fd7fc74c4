"""Which right each request of the management API needs, and what it is about: one rule a route, the first that fits.

Paths are matched as the router matches them: decoded once, and with no slash inside a name. What no rule knows needs
an unlimited admin: a route that somebody adds and forgets here is closed, not open. A test holds the two together.
Calls of functions (`/fn/...`) need `invoke` of that function, which `door` sees to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..state.access_records import Right

Kind = Literal["", "function", "object", "checkpoint", "budget", "price", "key", "project", "secret", "invocation"]
READING = frozenset({"GET", "HEAD", "OPTIONS"})
SOCKET = "WEBSOCKET"
"""Stands for the method of a WebSocket's handshake, so that no rule for reading is one for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePermission:
    right: Right | None
    """None: any key will do."""
    verb: str
    """What the audit log calls it; empty for what changes nothing."""
    kind: Kind = ""
    """Of the object that it is about."""
    name: str = ""
    """Of the object, as far as the path says it."""
    unlimited: bool = False
    """Whether it is about all functions at once."""
    what: str = ""
    """For refusals: "PUT /api/v1/prices"."""

    @property
    def function(self) -> str:
        """The one that it is about, as far as the path says it."""
        return self.name if self.kind in ("function", "budget") else ""


@dataclass(frozen=True, slots=True)
class RouteRule:
    methods: frozenset[str]
    path: str
    pattern: re.Pattern[str]
    right: Right | None
    verb: str = ""
    kind: Kind = ""
    unlimited: bool = False


def _rule(
    methods: str, path: str, right: Right | None, verb: str = "", kind: Kind = "", *, unlimited: bool = False
) -> RouteRule:
    pattern = re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", path)
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)
    listed = frozenset(methods.split())
    return RouteRule(
        listed | {"HEAD"} if "GET" in listed else listed, path, re.compile(pattern), right, verb, kind, unlimited
    )


_FUNCTION = "/api/v1/functions/{name}"
RULES = (
    _rule("GET", "/openapi.json", None),
    _rule("GET", "/metrics", "read"),
    _rule("GET", "/api/v1/activity", "read"),
    _rule("GET", "/api/v1/status", "read"),
    _rule("GET", "/api/v1/objects/{key:path}", "read", kind="object"),
    _rule("PUT", "/api/v1/objects/{key:path}", "deploy", kind="object"),
    _rule("GET", "/api/v1/checkpoints", "read", unlimited=True),
    _rule("GET", "/api/v1/checkpoints/{id}", "read", kind="checkpoint"),
    _rule("DELETE", "/api/v1/checkpoints/{id}", "deploy", "checkpoint.rm", "checkpoint", unlimited=True),
    _rule("GET", "/api/v1/functions", "read"),
    _rule("POST", "/api/v1/functions", "deploy", "function.deploy", "function"),
    _rule("POST", "/api/v1/forecast", "deploy"),
    _rule("GET", _FUNCTION, "read", kind="function"),
    _rule("DELETE", _FUNCTION, "deploy", "function.rm", "function"),
    _rule("GET", f"{_FUNCTION}/versions", "read", kind="function"),
    _rule("GET", f"{_FUNCTION}/traffic", "read", kind="function"),
    _rule("PUT", f"{_FUNCTION}/aliases/{{alias}}", "deploy", "function.alias", "function"),
    _rule("DELETE", f"{_FUNCTION}/aliases/{{alias}}", "deploy", "function.alias.rm", "function"),
    _rule("PUT", f"{_FUNCTION}/split", "deploy", "function.split", "function"),
    _rule("POST", f"{_FUNCTION}/rollback", "deploy", "function.rollback", "function"),
    _rule("PUT", f"{_FUNCTION}/scale", "deploy", "function.scale", "function"),
    _rule("GET", f"{_FUNCTION}/openapi.json", None, kind="function"),
    _rule("GET", f"{_FUNCTION}/logs", "read", kind="function"),
    _rule(SOCKET, f"{_FUNCTION}/shell", "deploy", "function.shell", "function"),
    _rule("GET", "/api/v1/invocations", "read"),
    # Whoever may call may also fetch what came of it; that it is a call of one of his functions, the handler checks.
    _rule("GET", "/api/v1/invocations/{id}", None, kind="invocation"),
    _rule("DELETE", "/api/v1/invocations/{id}", "invoke", "invocation.cancel", "invocation"),
    _rule("POST", "/api/v1/invocations/{id}/cancel", "invoke", "invocation.cancel", "invocation"),
    _rule("GET", "/api/v1/invocations/{id}/result", "invoke", kind="invocation"),
    _rule("GET", "/api/v1/invocations/{id}/events", "invoke", kind="invocation"),
    _rule("POST", "/api/v1/invocations/{id}/redrive", "invoke", "invocation.redrive", "invocation"),
    _rule("POST", "/api/v1/invocations/{id}/replay", "invoke", "invocation.replay", "invocation"),
    _rule("POST", "/api/v1/invocations/{id}/redeliver", "invoke", "invocation.redeliver", "invocation"),
    _rule("GET", "/api/v1/async", "read"),
    _rule("GET", "/api/v1/schedules", "read"),
    _rule("GET", "/api/v1/webhooks/secret", "admin", unlimited=True),
    _rule("POST", "/api/v1/webhooks/secret", "admin", "webhook.secret.rotate", unlimited=True),
    _rule("GET", "/api/v1/invocations/{id}/plan", "read", kind="invocation"),
    _rule("GET", "/api/v1/usage", "read"),
    _rule("GET", "/api/v1/invoices/{month}", "read"),
    _rule("GET", "/api/v1/ledger", "read"),
    _rule("GET", "/api/v1/prices", "read"),
    _rule("POST", "/api/v1/prices", "admin", "price.set", "price", unlimited=True),
    _rule("GET", "/api/v1/budgets", "read"),
    _rule("PUT", "/api/v1/budgets/{function}", "admin", "budget.set", "budget"),
    _rule("DELETE", "/api/v1/budgets/{function}", "admin", "budget.rm", "budget"),
    _rule("GET", "/api/v1/keys", "admin", unlimited=True),
    _rule("POST", "/api/v1/keys", "admin", "key.create", "key", unlimited=True),
    _rule("POST", "/api/v1/keys/{name}/rotate", "admin", "key.rotate", "key", unlimited=True),
    _rule("DELETE", "/api/v1/keys/{name}", "admin", "key.revoke", "key", unlimited=True),
    _rule("GET", "/api/v1/projects", "read"),
    _rule("PUT", "/api/v1/projects/{name}", "admin", "project.set", "project", unlimited=True),
    _rule("DELETE", "/api/v1/projects/{name}", "admin", "project.rm", "project", unlimited=True),
    _rule("GET", "/api/v1/secrets", "read"),
    _rule("POST", "/api/v1/secrets/rekey", "admin", "secret.rekey", "secret", unlimited=True),
    _rule("PUT", "/api/v1/secrets/{project}/{name}", "deploy", "secret.set", "secret"),
    _rule("DELETE", "/api/v1/secrets/{project}/{name}", "deploy", "secret.rm", "secret"),
    _rule("GET", "/api/v1/audit", "admin", unlimited=True),
)


def permission_of(method: str, path: str) -> RoutePermission:
    what = f"{method} {path[:100]}"
    for rule, match in _fitting(method, path):
        parts = match.groupdict()
        name = "/".join(parts[part] for part in ("project", "name", "function", "key", "id") if part in parts)
        return RoutePermission(
            right=rule.right,
            verb="" if method in READING else rule.verb,
            kind=rule.kind,
            name=name,
            unlimited=rule.unlimited,
            what=what,
        )
    verb = "" if method in READING else "unknown"
    return RoutePermission(right="admin", verb=verb, name="" if not verb else path[:100], unlimited=True, what=what)


def _fitting(method: str, path: str) -> Iterator[tuple[RouteRule, re.Match[str]]]:
    for rule in RULES:
        if method in rule.methods and (match := rule.pattern.fullmatch(path)) is not None:
            yield rule, match
