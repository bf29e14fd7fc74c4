"""Permissions of the management API's routes: one rule a route, the first that matches a request decides.

The rules are made from the table of endpoints, which stands above this package and is handed to the middleware. Paths
are matched as the router matches them: decoded once, with no slash inside a name. A request without a rule needs an
unlimited admin: a route that was forgotten is closed, not open. Calls of functions (`/fn/...`) have no rule here: the
middleware demands `invoke` of that function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..state.access_records import Right

Kind = Literal[
    "",
    "function",
    "object",
    "checkpoint",
    "upload",
    "budget",
    "price",
    "key",
    "project",
    "secret",
    "invocation",
    "node",
    "volume",
]
Permission = Right | Literal["open", "key"]
"""Permission of a route: none (`open`), any valid key (`key`), or a key with that right."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
SOCKET = "WEBSOCKET"
"""Stands for the method of a WebSocket's handshake, so that no rule for reading matches one."""
_NAMES = ("project", "name", "function", "key", "id")
"""Path parameters that name the object, in the order in which they make up its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePermission:
    """The permission that one request demands, and its verb and object for the audit log."""

    right: Right | None
    """None: any key will do."""
    verb: str
    """Verb in the audit log; empty for what changes nothing."""
    kind: Kind = ""
    """Kind of the object."""
    name: str = ""
    """Name of the object, as far as the path has it."""
    unlimited: bool = False
    """True if it is about all functions at once."""
    span: tuple[int, int] = (0, 0)
    """Where the function's name is in the path."""
    what: str = ""
    """Method and path, for error messages: "PUT /api/v1/prices"."""

    @property
    def function(self) -> str:
        """The function's name, as far as the path has it."""
        return self.name if self.kind in ("function", "budget") else ""

    def path_with(self, path: str, function: str) -> str:
        """The path with this name of the function."""
        begin, end = self.span
        return path[:begin] + function + path[end:]


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The permission of one route, its audit verb, and the kind of object that its path names."""

    method: str
    path: str
    permission: Permission
    verb: str = field(default="", kw_only=True)
    kind: Kind = field(default="", kw_only=True)
    unlimited: bool = field(default=False, kw_only=True)
    before_sync: bool = field(default=False, kw_only=True)
    """True if the route is served before Redis was read once, when no key can be verified."""

    @property
    def right(self) -> Right | None:
        """None: no right of the key is demanded."""
        return None if self.permission == "open" or self.permission == "key" else self.permission


class RouteRules:
    """Finds the rule of a request. Open paths are looked up without a pattern: static files are many."""

    def __init__(self, rules: Iterable[RouteRule]) -> None:
        listed = list(rules)
        self._rules = [(_methods(rule), _pattern(rule.path), rule) for rule in listed if rule.permission != "open"]
        opened = [rule.path for rule in listed if rule.permission == "open"]
        self._open = frozenset(path for path in opened if "{" not in path)
        self._open_folders = tuple(path.partition("{")[0] for path in opened if "{" in path)
        self.before_sync = frozenset(rule.path for rule in listed if rule.before_sync)
        """Paths that are served before Redis was read once."""

    def is_open(self, path: str) -> bool:
        """Checks whether anyone may request the path, without a key."""
        return path in self._open or path.startswith(self._open_folders)

    def permission_of(self, method: str, path: str) -> RoutePermission:
        """The permission that a request demands: that of the first matching rule."""
        what = f"{method} {path[:100]}"
        for methods, pattern, rule in self._rules:
            if method in methods and (match := pattern.fullmatch(path)) is not None:
                parts = match.groupdict()
                named = next((part for part in _NAMES if part in parts), "")
                return RoutePermission(
                    right=rule.right,
                    verb="" if method in READING else rule.verb,
                    kind=rule.kind,
                    name="/".join(parts[part] for part in _NAMES if part in parts),
                    unlimited=rule.unlimited,
                    span=match.span(named) if named else (0, 0),
                    what=what,
                )
        verb = "" if method in READING else "unknown"
        return RoutePermission(right="admin", verb=verb, name="" if not verb else path[:100], unlimited=True, what=what)


def _methods(rule: RouteRule) -> frozenset[str]:
    return frozenset({"GET", "HEAD"} if rule.method == "GET" else {rule.method})


def _pattern(path: str) -> re.Pattern[str]:
    pattern = re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", path)
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern))
