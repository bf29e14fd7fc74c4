"""CORS: preflights, responses that pages may read, and functions without it."""

from __future__ import annotations

import pytest

from fleetstart.controller.gateway.cors import allowed_origin
from tests.controller.conftest import ControllerProcess, HandNode

APP = "https://app.example.com"
PREFLIGHT = {"origin": APP, "access-control-request-method": "PATCH"}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ([APP], APP.encode(), APP.encode()),
        ([APP], b"https://APP.example.com", b"https://APP.example.com"),
        ([APP], b"https://app.example.com.evil.com", None),
        ([APP], b"http://app.example.com", None),
        ([APP], b"null", None),
        ([APP, "*"], b"null", b"*"),
        ([], APP.encode(), None),
    ],
)
def test_origins(origins: list[str], origin: bytes, allowed: bytes | None) -> None:
    assert allowed_origin(origins, origin) == allowed


def test_a_preflight_is_answered_at_the_gateway(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f", cors=[APP])
    wanted = PREFLIGHT | {"access-control-request-headers": "content-type, idempotency-key"}
    answer = controller.http.options("/fn/f/any/path", headers=wanted)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-allow-methods"] == "PATCH"
    assert answer.headers["access-control-allow-headers"] == "content-type, idempotency-key"
    assert answer.headers["vary"] == "origin"
    stranger = controller.http.options("/fn/f", headers=PREFLIGHT | {"origin": "https://evil.example.com"})
    assert stranger.status_code == 403
    assert "access-control-allow-origin" not in stranger.headers
    assert not node.orders, "nobody was woken"
    assert controller.http.options("/fn/f", headers={"origin": APP}).json()["method"] == "OPTIONS", "no preflight"


def test_answers_and_errors_may_be_read_by_pages_with_our_headers(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("f", cors=["*"], max_body_bytes=10)
    answer = controller.http.post("/fn/f", content=b"x", headers={"origin": APP})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    exposed = answer.headers["access-control-expose-headers"]
    for name in ("x-request-id", "fs-cost", "fs-billed-ms", "server-timing", "retry-after"):
        assert name in answer.headers or name == "retry-after"
        assert name in exposed
    refused = controller.http.post("/fn/f", content=b"x" * 11, headers={"origin": APP})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (413, "*")
    stream = controller.http.get("/fn/f/stream", headers={"origin": APP})
    assert stream.headers["access-control-allow-origin"] == "*"


def test_it_is_off_unless_it_is_asked_for(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f")
    answer = controller.http.options("/fn/f", headers=PREFLIGHT)
    assert answer.status_code == 403, "without keys, pages of other sites may not call"
    key = controller.http.post("/api/v1/keys", json={"name": "admin", "rights": ["admin"]}).json()["key"]
    controller.http.headers["authorization"] = f"Bearer {key}"
    answer = controller.http.options("/fn/f", headers=PREFLIGHT)
    assert answer.json()["headers"]["origin"] == APP, "the function's own app answers"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert controller.http.options("/fn/nothing", headers=PREFLIGHT).status_code == 404
    assert controller.http.options("/fn/f@nothing", headers=PREFLIGHT).status_code == 404


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/path", "https://a b", ""])
def test_what_is_no_origin_is_refused_at_deploy(controller: ControllerProcess, origin: str) -> None:
    spec = {"name": "f", "bundle": "b" * 64, "entry": "handler:run", "cors": [origin]}
    answer = controller.http.post("/api/v1/functions", json=spec)
    assert answer.status_code == 400
    assert "is no origin" in answer.json()["error"]["message"]
