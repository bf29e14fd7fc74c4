"""Sandbox headers: responses of functions that a browser must keep apart from our own pages; a call's timeouts."""

from __future__ import annotations

import pytest

from fleetstart.controller.http.headers import (
    CALL_MAX_S,
    SANDBOX,
    WHOLE_ORIGIN,
    RawHeaders,
    queue_timeout_s,
    request_headers,
    response_headers,
    sandboxed,
    scoped_cookie,
)
from fleetstart.runtime.contract import worker_headers
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
        b"text/javascript", b"", b"nonsense", b"*/*", b"application/json, text/html", b"text/plain;x,text/html",
        b"image/png,text/html", b"application/json;a=b,text/html", b'text/plain;a="b,text/html',
        b'text/plain;a="b,text/html"', b"text/plain\ttext/html", b"image/ text/html", b"text/plain;a=b text/html",
    ],
)  # fmt: skip
def test_what_a_browser_might_run_is_confined(kind: bytes) -> None:
    assert sandboxed(of(kind)) == [*of(kind), NOSNIFF, (POLICY, SANDBOX)]


@pytest.mark.parametrize(
    "kind",
    [
        b"text/plain", b"image/png", b"audio/wav", b"application/octet-stream", b"application/json; charset=utf-8",
        b"Text/Plain;charset=\"utf-8\"", b"text/event-stream;charset=utf-8;", b"audio/L16; rate=24000; channels=1",
    ],
)  # fmt: skip
def test_what_no_browser_runs_is_only_not_guessed_about(kind: bytes) -> None:
    assert sandboxed(of(kind)) == [*of(kind), NOSNIFF]


def test_json_is_not_guessed_about_either() -> None:
    assert sandboxed(of(b"application/json")) == [*of(b"application/json"), NOSNIFF]


def test_what_the_platform_says_of_a_call_no_handler_says() -> None:
    names = (b"Fs-Version", b"Fs-Cost", b"Fs-Error-Message", b"Idempotent-Replayed", b"Idempotent-Retaken", b"Fs-Busy")
    passed = response_headers([(name, b"1") for name in names], root="/fn/web", keep_length=True)
    assert {name for name, _ in passed} == {b"x-content-type-options", POLICY}


def test_headers_that_act_on_the_whole_host_are_dropped() -> None:
    """The ten that were seen to pass, and those that a reverse proxy obeys."""
    acting = [(name.encode(), b"x") for name in WHOLE_ORIGIN]
    own = [(b"X-Accel-Buffering", b"no"), (b"ETag", b"1"), (b"Content-Type", b"text/plain")]
    passed = response_headers([*acting, *own], root="/fn/web", keep_length=True)
    assert passed == [(b"x-accel-buffering", b"no"), (b"etag", b"1"), (b"content-type", b"text/plain"), NOSNIFF]
    assert (
        response_headers([(b"CLEAR-Site-Data", b'"*"')], root="/fn/web", keep_length=True)[0][0] != b"clear-site-data"
    )


@pytest.mark.parametrize(
    ("cookie", "scoped"),
    [
        (b"a=1", b"a=1; Path=/fn/web"),
        (b"a=1; Path=/; HttpOnly; Domain=example.com", b"a=1; HttpOnly; Path=/fn/web"),
        (b"a=1; path=/fn/web/x; SameSite=Lax", b"a=1; SameSite=Lax; Path=/fn/web/x"),
        (b"a=1; Path=/x/", b"a=1; Path=/fn/web/x"),
        (b"a=1; Path=/fn/webs", b"a=1; Path=/fn/web/fn/webs"),
        (b"a=1; Path=/fn/web; PATH=/", b"a=1; Path=/fn/web"),
        (b"a=1;Path=nonsense;DOMAIN", b"a=1; Path=/fn/web"),
        (b"", b"; Path=/fn/web"),
    ],
)
def test_a_cookie_goes_to_its_own_function_alone(cookie: bytes, scoped: bytes) -> None:
    assert scoped_cookie(cookie, b"/fn/web") == scoped


def test_without_a_type_or_with_two_it_is_confined() -> None:
    assert sandboxed([]) == [NOSNIFF, (POLICY, SANDBOX)]
    assert (POLICY, SANDBOX) in sandboxed([(b"content-type", b"text/plain"), (b"content-type", b"text/html")])
    both = [(b"content-type", b"application/json"), (b"content-type", b"text/html")]
    assert (POLICY, SANDBOX) in sandboxed(both)


def test_the_apps_own_policy_stays_and_cannot_undo_ours() -> None:
    own = [*of(b"text/html"), (POLICY, b"sandbox allow-same-origin"), (b"x-content-type-options", b"guess")]
    assert sandboxed(own) == [*own[:-1], NOSNIFF, (POLICY, SANDBOX)]


@pytest.mark.parametrize(
    ("asked", "limit_s", "allowed_s"),
    [
        (None, None, None),
        (b"0", None, 0),
        (b"2.5", 1.0, 1.0),
        (b"inf", 1.0, 1.0),
        (b"inf", None, CALL_MAX_S),
        (b"1e300", None, CALL_MAX_S),
        (b"nan", None, None),
        (b"-1", 1.0, 1.0),
        (b"soon", None, None),
    ],
)
def test_a_queue_timeout_of_any_size_is_a_time(
    asked: bytes | None, limit_s: float | None, allowed_s: float | None
) -> None:
    assert queue_timeout_s(asked, limit_s) == allowed_s


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


def test_a_client_cannot_speak_to_a_worker_as_its_gateway_does() -> None:
    """Of all headers with which a gateway tells a worker something, a client's own are dropped."""
    told = {
        value
        for name, value in vars(worker_headers).items()
        if name.endswith("_HEADER") and name not in ("TRACEPARENT_HEADER", "TRACESTATE_HEADER")
    }
    answers = {"fs-draining", "fs-busy", "fs-entered", "fs-error", "x-should-retry"}
    scope = {
        "headers": [(name.encode(), b"1") for name in sorted(told - answers)] + [(b"x-own", b"1")],
        "client": None,
        "scheme": "http",
    }
    left = dict(request_headers(scope))
    assert left.pop("fs-scheduled-at", "1") == "1", "which handlers may be shown, and a schedule alone sets"
    assert left == {"x-own": "1"}
