"""Sandbox headers: responses of functions that a browser must keep apart from our own pages."""

from __future__ import annotations

import pytest

from fleetstart.controller.http.headers import SANDBOX, RawHeaders, sandboxed
from tests.controller.conftest import ControllerProcess, HandNode

POLICY = b"content-security-policy"
NOSNIFF = (b"x-content-type-options", b"nosniff")


def of(content_type: bytes) -> RawHeaders:
    return [(b"x-own", b"1"), (b"content-type", content_type)]


@pytest.mark.parametrize(
    "kind",
    [
        b"text/html", b"TEXT/HTML; charset=utf-8", b" text/html", b"image/svg+xml", b"text/xml", b"application/xml",
        b"application/xhtml+xml", b"application/atom+xml", b"multipart/x-mixed-replace; boundary=x", b"text/xsl",
        b"text/javascript", b"", b"nonsense", b"*/*", b"application/json, text/html",
    ],
)  # fmt: skip
def test_what_a_browser_might_run_is_confined(kind: bytes) -> None:
    assert sandboxed(of(kind)) == [*of(kind), NOSNIFF, (POLICY, SANDBOX)]


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"image/png", b"audio/wav", b"application/octet-stream", b"application/json; charset=utf-8"]
)
def test_what_no_browser_runs_is_only_not_guessed_about(kind: bytes) -> None:
    assert sandboxed(of(kind)) == [*of(kind), NOSNIFF]


def test_json_passes_as_it_is() -> None:
    headers = of(b"application/json")
    assert sandboxed(headers) is headers


def test_without_a_type_or_with_two_it_is_confined() -> None:
    assert sandboxed([]) == [NOSNIFF, (POLICY, SANDBOX)]
    assert (POLICY, SANDBOX) in sandboxed([(b"content-type", b"text/plain"), (b"content-type", b"text/html")])
    both = [(b"content-type", b"application/json"), (b"content-type", b"text/html")]
    assert (POLICY, SANDBOX) in sandboxed(both)


def test_the_apps_own_policy_stays_and_cannot_undo_ours() -> None:
    own = [*of(b"text/html"), (POLICY, b"sandbox allow-same-origin"), (b"x-content-type-options", b"guess")]
    assert sandboxed(own) == [*own[:-1], NOSNIFF, (POLICY, SANDBOX)]


def test_a_gateway_confines_pages_and_kept_answers(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("f")
    answer = controller.http.get("/fn/f/chunks")
    assert answer.headers["content-security-policy"] == SANDBOX.decode()
    assert answer.headers["x-content-type-options"] == "nosniff"
    plain = controller.http.get("/fn/f/echo")
    assert "content-security-policy" not in plain.headers
    kept = controller.http.get("/fn/f/chunks", headers={"prefer": "respond-async, wait=20"})
    assert kept.headers["content-security-policy"] == SANDBOX.decode()
    result = controller.http.get(f"/api/v1/invocations/{kept.headers['x-request-id']}/result")
    assert result.headers["content-security-policy"] == SANDBOX.decode(), "it is read at another path of this origin"
