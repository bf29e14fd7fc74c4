"""Each route of the management API has its rule, and no way of writing a path leads past it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match, Route, WebSocketRoute

from fleetstart.controller.api.app import ManagementApi
from fleetstart.controller.auth.route_rules import RULES, SOCKET, permission_of

WORDS = {"{name}": "chat", "{key:path}": "bundles/0", "{id}": "x1", "{alias}": "prod", "{month}": "2026-11",
         "{function}": "chat", "{project}": "ml"}  # fmt: skip

FOR_EVERYBODY = {"/healthz", "/", "/ui", "/ui/{file:path}"}


class Anything:
    """Stands for the services: routes are made without touching them."""

    def __getattr__(self, name: str) -> Any:
        return [] if name == "routes" else Anything()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return Anything()


def routes() -> list[Route | WebSocketRoute]:
    from fleetstart.controller.api.audit import AccessApi
    from fleetstart.controller.api.billing import BillingApi
    from fleetstart.controller.api.invocations import InvocationsApi
    from fleetstart.controller.api.metrics import ObservabilityApi

    nothing: Any = Anything()
    api = ManagementApi(nothing).app.routes
    more = [
        *BillingApi(nothing, nothing, nothing, nothing).routes,
        *AccessApi(nothing, nothing, nothing, nothing).routes,
    ]
    more += InvocationsApi(*[nothing] * 9).routes
    more += ObservabilityApi(
        nothing, nothing, nothing, calls=nothing, lag=nothing, process=nothing, budgets=nothing
    ).routes
    kinds = (Route, WebSocketRoute)
    return [route for route in [*api, *more] if isinstance(route, kinds) and route.path not in FOR_EVERYBODY]


def filled(path: str) -> str:
    for word, value in WORDS.items():
        path = path.replace(word, value)
    assert "{" not in path, path
    return path


def test_every_route_has_its_rule_and_every_rule_its_route() -> None:
    used = set()
    for route in routes():
        for method in (route.methods or ()) if isinstance(route, Route) else (SOCKET,):
            need = permission_of(method, filled(route.path))
            assert (need.right, need.verb) != ("admin", "unknown"), f"{method} {route.path} has no rule"
            if method != "HEAD":
                used.add((method, route.path))
    ruled = {(method, rule.path) for rule in RULES for method in rule.methods if method != "HEAD"}
    assert ruled - used == set()


def test_what_changes_something_is_recorded_and_what_reads_is_not() -> None:
    for rule in RULES:
        for method in rule.methods:
            verb = permission_of(method, filled(rule.path)).verb
            unrecorded = method in ("GET", "HEAD") or "objects" in rule.path or "forecast" in rule.path
            assert bool(verb) != unrecorded, rule.path


@pytest.mark.parametrize(
    "path",
    ["//api/v1/keys", "/api/v1//keys", "/api/v1/keys/", "/api/v1/keys\n", "/API/v1/keys", "/api/v1/./keys",
     "/api/v1/functions/../keys", "/api/v1/nothing", "/", "", "/metrics/../api/v1/keys"],
)  # fmt: skip
def test_what_no_rule_knows_is_for_admins_alone(path: str) -> None:
    need = permission_of("GET", path)
    assert (need.right, need.unlimited) == ("admin", True)


@given(path=st.text(max_size=80), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "TRACE"]))
def test_whatever_the_router_takes_has_been_seen_by_the_rule_for_it(path: str, method: str) -> None:
    path = "/api/v1/" + path
    need = permission_of(method, path)
    for route in ROUTES:
        match, _ = route.matches({"type": "http", "path": path, "method": method, "root_path": ""})
        if match == Match.FULL:
            assert need.right is not None
            return


ROUTES = routes()
