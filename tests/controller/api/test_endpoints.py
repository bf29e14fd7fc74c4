"""The table of endpoints: routes, permissions, audit verbs and the OpenAPI document are made from it and agree."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match, Route, WebSocketRoute

from fleetstart.controller.api.app import build_app
from fleetstart.controller.api.endpoints import ENDPOINTS, endpoints, markdown_table, route_rules, routes_of
from fleetstart.controller.api.openapi.document import document
from fleetstart.controller.api.openapi.endpoint import Endpoint
from fleetstart.controller.auth.route_rules import SOCKET, RouteRules

WORDS = {"{name}": "chat", "{key:path}": "bundles/0", "{id}": "x1", "{alias}": "prod", "{month}": "2026-11",
         "{function}": "chat", "{object}": "part-0", "{project}": "ml", "{file:path}": "app.js"}  # fmt: skip
SIGNED = "/api/v1/certificates"
"""Open to all, because what it takes is signed by a key that the system knows; it changes an expiry."""
OPEN = {"/healthz", "/readyz", "/", "/ui", "/ui/{file:path}", SIGNED}
RULES = RouteRules(route_rules())
UNRECORDED = {"/api/v1/objects/{key:path}", "/api/v1/forecast", SIGNED}
"""Change nothing that a function is served from: a deploy that uses an uploaded object is recorded."""


def unbuilt() -> list[object]:
    """An instance of each class in the table, without its constructor: routes need no more."""
    return [object.__new__(kind) for kind in ENDPOINTS]


def routes() -> list[Route | WebSocketRoute]:
    return [route for route in build_app(unbuilt()).routes if isinstance(route, Route | WebSocketRoute)]


ROUTES = [route for route in routes() if route.path not in OPEN]


def filled(path: str) -> str:
    for word, value in WORDS.items():
        path = path.replace(word, value)
    assert "{" not in path, path
    return path


def test_every_route_has_its_entry_and_every_entry_its_route() -> None:
    routed = set()
    for route in routes():
        methods = route.methods or set() if isinstance(route, Route) else {SOCKET}
        routed |= {(method, route.path) for method in methods if method != "HEAD" or "GET" not in methods}
    assert routed == {(one.method, one.path) for one in endpoints()}
    assert len(endpoints()) == len(routed)


def test_an_endpoint_is_served_by_the_class_that_it_is_listed_under() -> None:
    for kind, group in ENDPOINTS.items():
        for one in group:
            assert getattr(kind, one.handler.__name__) is one.handler, one.path
    with pytest.raises(KeyError):
        routes_of(unbuilt()[1:])


@pytest.mark.parametrize("one", endpoints(), ids=lambda one: f"{one.method} {one.path}")
def test_every_endpoint_demands_a_permission_or_is_open(one: Endpoint) -> None:
    path = filled(one.path)
    assert RULES.is_open(path) == (one.permission == "open") == (one.path in OPEN)
    if one.permission == "open":
        assert one.method == "GET" or one.path == SIGNED
        return
    for method in {one.method, "HEAD"} if one.method == "GET" else {one.method}:
        demanded = RULES.permission_of(method, path)
        assert demanded.right == (None if one.permission == "key" else one.permission)
        assert demanded.unlimited == one.unlimited
        assert demanded.kind == one.kind


@pytest.mark.parametrize("one", endpoints(), ids=lambda one: f"{one.method} {one.path}")
def test_what_changes_something_is_recorded_and_what_reads_is_not(one: Endpoint) -> None:
    changes = one.method not in ("GET", "HEAD") and one.path not in UNRECORDED
    assert bool(one.audit) == changes
    if one.permission != "open":
        assert RULES.permission_of(one.method, filled(one.path)).verb == one.audit
    if changes:
        assert one.permission in ("invoke", "deploy", "node", "admin")


def test_only_what_knows_nothing_yet_is_served_before_redis_was_read() -> None:
    assert RULES.before_sync == {"/api/v1/status", "/openapi.json"}


@given(path=st.text(max_size=80), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "TRACE"]))
def test_whatever_the_router_takes_has_been_seen_by_the_rule_for_it(path: str, method: str) -> None:
    path = "/api/v1/" + path
    need = RULES.permission_of(method, path)
    for route in ROUTES:
        match, _ = route.matches({"type": "http", "path": path, "method": method, "root_path": ""})
        if match == Match.FULL:
            assert need.right is not None
            return


def test_the_document_has_every_documented_endpoint_with_its_types() -> None:
    described: dict[str, Any] = document(endpoints(), "http://here")
    found = {(method.upper(), path) for path, operations in described["paths"].items() for method in operations}
    wanted = [one for one in endpoints() if one.documented]
    assert found == {(one.method, one.path.replace(":path}", "}")) for one in wanted}
    for one in wanted:
        operation = described["paths"][one.path.replace(":path}", "}")][one.method.lower()]
        names = [parameter["name"] for parameter in operation["parameters"]]
        assert names == [*re.findall(r"\{(\w+)", one.path), *one.query, *one.headers]
        assert ("requestBody" in operation) == (one.body is not None)
        assert str(one.status) in operation["responses"]
    schemas = described["components"]["schemas"]
    text = msgspec.json.encode(described).decode()
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= set(schemas)


def test_the_table_for_the_documentation_has_a_line_for_each_endpoint() -> None:
    lines = markdown_table().splitlines()[2:]
    assert len(lines) == len(endpoints())
    assert all(line.count(" | ") == 4 for line in lines)
    assert any(
        line.startswith("| `POST /api/v1/functions?alias=live&percent=100&probe=0` | deploy |") for line in lines
    )
    assert any("| VersionRef or nothing | Traffic |" in line for line in lines)


def test_no_path_that_is_open_is_one_of_a_route_that_is_not() -> None:
    """A path is open for each method: a node called like an open path could be removed without a key otherwise."""
    rules = [one for one in route_rules() if one.permission != "open"]
    for path in OPEN:
        if "{" not in path:
            parts = path.split("/")
            assert not [
                one.path
                for one in rules
                if len(one.path.split("/")) == len(parts)
                and all(
                    ours == theirs or "{" in theirs for ours, theirs in zip(parts, one.path.split("/"), strict=True)
                )
            ]
