"""Rules of routes: paths match as the router matches them, and what no rule knows is closed."""

from __future__ import annotations

import pytest

from fleetstart.controller.api.endpoints import route_rules
from fleetstart.controller.auth.route_rules import SOCKET, RouteRule, RouteRules

ALL = RouteRules(route_rules())
RULES = RouteRules(
    [
        RouteRule("GET", "/", "open"),
        RouteRule("GET", "/ui/{file:path}", "open"),
        RouteRule("GET", "/status", "key", before_sync=True),
        RouteRule("GET", "/functions/{name}", "read", verb="read", kind="function"),
        RouteRule("PUT", "/secrets/{project}/{name}", "deploy", verb="secret.set", kind="secret"),
        RouteRule(SOCKET, "/functions/{name}", "deploy", verb="function.shell", kind="function"),
    ]
)


@pytest.mark.parametrize(
    "path",
    ["//api/v1/keys", "/api/v1//keys", "/api/v1/keys/", "/api/v1/keys\n", "/API/v1/keys", "/api/v1/./keys",
     "/api/v1/functions/../keys", "/api/v1/nothing", "", "/metrics/../api/v1/keys"],
)  # fmt: skip
def test_what_no_rule_knows_is_for_admins_alone(path: str) -> None:
    need = ALL.permission_of("GET", path)
    assert (need.right, need.unlimited) == ("admin", True)
    assert not ALL.is_open(path)


@pytest.mark.parametrize("path", ["/", "/ui/", "/ui/app.js", "/ui/a/b"])
def test_open_paths_need_no_key(path: str) -> None:
    assert RULES.is_open(path)


@pytest.mark.parametrize("path", ["", "//", "/ui", "/uix/app.js", "/status", "/functions/f", "/x/ui/app.js"])
def test_all_other_paths_are_not_open(path: str) -> None:
    assert not RULES.is_open(path)


def test_without_rules_nothing_is_open() -> None:
    none = RouteRules([])
    assert not none.is_open("/")
    assert none.permission_of("POST", "/x").verb == "unknown"


def test_the_method_decides_and_reading_is_never_recorded() -> None:
    reading = RULES.permission_of("HEAD", "/functions/f")
    assert (reading.right, reading.verb, reading.function) == ("read", "", "f")
    shell = RULES.permission_of(SOCKET, "/functions/f")
    assert (shell.right, shell.verb) == ("deploy", "function.shell")
    assert RULES.permission_of("DELETE", "/functions/f").right == "admin"
    assert RULES.permission_of("GET", "/status").right is None


def test_an_object_is_named_by_all_parts_of_the_path_that_name_it() -> None:
    secret = RULES.permission_of("PUT", "/secrets/ml/TOKEN")
    assert (secret.kind, secret.name, secret.function) == ("secret", "ml/TOKEN", "")
    assert RULES.permission_of("PUT", "/secrets/ml/TO/KEN").right == "admin"
