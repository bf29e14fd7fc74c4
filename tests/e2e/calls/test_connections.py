"""Connections to apps: WebSockets and streams in both directions, and what follows when one ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.function.spec import Limits
from tests.e2e.systems import System, error_in, running
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

APP = """
import asyncio, json, os
from fleetstart.runtime import Scale, function

async def app(scope, receive, send):
    if scope["type"] == "websocket":
        await socket(scope, receive, send)
    elif scope["type"] == "http":
        await http(scope, receive, send)

async def http(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if scope["path"].endswith("/wait"):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        message = await receive()
        print("app heard", message["type"])
        return
    if scope["path"].endswith("/exit"):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the whole text", "more_body": True})
        await asyncio.sleep(0.2)
        os._exit(0)
    path = scope["raw_path"].removeprefix(scope["root_path"].encode())
    told = [scope["method"].encode(), path, scope["query_string"], body[::-1]]
    head = [(b"content-type", b"application/octet-stream"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
    await send({"type": "http.response.start", "status": 207, "headers": head})
    await send({"type": "http.response.body", "body": b"\\n".join(told)})

async def socket(scope, receive, send):
    await receive()
    if scope["path"].endswith("/refuse"):
        await send({"type": "websocket.close"})
        return
    protocol = (scope["subprotocols"] or [None])[-1]
    await send({"type": "websocket.accept", "subprotocol": protocol})
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            print("socket heard", message["code"])
            return
        text = message.get("text")
        if text == "where":
            path = scope["raw_path"].decode().removeprefix(scope["root_path"])
            told = [path, scope["query_string"].decode(), os.environ.get("RELEASE")]
            await send({"type": "websocket.send", "text": json.dumps(told)})
        elif text == "close":
            await send({"type": "websocket.close", "code": 4001, "reason": "as asked"})
            return
        elif text == "return":
            return
        elif text == "raise":
            raise ValueError("no")
        elif text == "die":
            os._exit(3)
        elif text == "large":
            await send({"type": "websocket.send", "bytes": bytes(70_000)})
        elif text is not None:
            await send({"type": "websocket.send", "text": text})
        else:
            await send({"type": "websocket.send", "bytes": message["bytes"]})

app = function(memory="64MiB", concurrency=4, max_body="64KiB", scale=Scale(max=1, keep_alive_s=0.3))(app)
"""

HANDLERS = """
import asyncio, time
from fleetstart.runtime import Scale, function

ONE = Scale(max=1, keep_alive_s=600)

@function(memory="64MiB", scale=ONE)
async def awaits(nap_s: float = 0.0):
    print("awaits has begun" if nap_s else "awaits nothing")
    try:
        await asyncio.sleep(nap_s)
    except asyncio.CancelledError:
        print("awaits was cancelled")
        raise
    return "free"

@function(memory="64MiB", scale=ONE)
def yields(endless: bool = False):
    try:
        yield "first"
        while endless:
            time.sleep(0.01)
            yield "more"
    finally:
        print("yields was closed")

@function(memory="64MiB", scale=ONE)
async def ayields(endless: bool = False):
    try:
        yield "first"
        while endless:
            await asyncio.sleep(0.01)
            yield "more"
    finally:
        print("ayields was closed")
"""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy(APP, name="app")
        system.deploy_file(system.source(HANDLERS, folder="handlers"))
        yield system


def opened(system: System, path: str = "/fn/app", **options: Any) -> ClientConnection:
    socket: ClientConnection = connect(system.url.replace("http://", "ws://") + path, proxy=None, **options)
    return socket


def row_of(system: System, request: str) -> InvocationRow:
    return wait_until(
        lambda: [row for row in system.invocations() if request in (row.id, row.request_id)], what=f"row of {request}"
    )[0]


def ended(socket: ClientConnection) -> tuple[int | None, str]:
    """Close frame of the other side, after any messages before it."""
    try:
        while True:
            socket.recv(timeout=10)
    except ConnectionClosed as closed:
        return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (None, "")


def logged(system: System, name: str, text: str) -> None:
    wait_until(lambda: any(text in line.text for line in system.logs(name)), what=f"{text!r} in the log of {name}")


# ── WebSockets ─────────────────────────────────────────────────────────────────────────────────────


def test_text_and_bytes_pass_both_ways_and_are_billed_for_the_time(system: System) -> None:
    with opened(system, "/fn/app/a%20b/c?x=1", additional_headers={"x-request-id": "both"}) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"].startswith("inv-")
        assert socket.response.headers["fs-start"] in ("warm", "cold")
        for message in ("grüße", "", b"\x00\xff" * 500, "x" * 60_000):
            socket.send(message)
            assert socket.recv(timeout=10) == message
        socket.send("where")
        assert json.loads(socket.recv(timeout=10))[:2] == ["/a%20b/c", "x=1"]
        wait_until(lambda: system.info("app").running == 1, what="word of a socket that is open")
        # Four keep-alives long nobody says anything, and the worker is still there.
        with pytest.raises(TimeoutError):
            socket.recv(timeout=1.2)
        assert len(system.info("app").workers) == 1
        socket.send("still there")
        assert socket.recv(timeout=10) == "still there"
    row = row_of(system, "both")
    assert (row.status, row.error) == (101, "")
    assert row.billed_ms >= 1200
    assert row.cost_nusd > 0
    logged(system, "app", "socket heard 1000")


def test_subprotocols_are_the_apps_choice(system: System) -> None:
    with opened(system, subprotocols=["one", "two"]) as socket:
        assert socket.subprotocol == "two"
    with opened(system) as socket:
        assert socket.subprotocol is None


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [("close", 4001, "as asked"), ("return", 1000, ""), ("raise", 1011, "the handler raised")],
)
def test_the_app_ends_it(system: System, message: str, code: int, reason: str) -> None:
    with opened(system, additional_headers={"x-request-id": f"by-{message}"}) as socket:
        socket.send(message)
        told = ended(socket)
    assert told[0] == code
    assert reason in told[1]
    row = row_of(system, f"by-{message}")
    assert (row.status, row.error) == (101, "")
    wait_until(lambda: system.info("app").running == 0, what="word of its end")


def test_a_worker_that_dies_ends_it_with_a_code_and_is_billed_until_then(system: System) -> None:
    watch = Stopwatch()
    with opened(system, additional_headers={"x-request-id": "died"}) as socket:
        socket.send("open")
        assert socket.recv(timeout=10) == "open"
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.1)
        socket.send("die")
        assert ended(socket) == (1011, "its worker was lost")
        open_ms = watch.elapsed_s * 1000
    row = row_of(system, "died")
    assert (row.status, row.error) == (101, "worker_lost")
    assert 100 <= row.billed_ms <= open_ms
    with opened(system) as socket:
        socket.send("again")
        assert socket.recv(timeout=10) == "again"


def test_a_stream_whose_worker_exits_after_it_sent_all_is_billed(system: System) -> None:
    watch = Stopwatch()
    with system.http.stream("POST", "/fn/app/exit", json={}) as answer:
        text = b""
        with contextlib.suppress(httpx.TransportError):
            for piece in answer.iter_raw():
                text += piece
    open_ms = watch.elapsed_s * 1000
    assert text.startswith(b"the whole text")
    row = row_of(system, answer.headers["x-request-id"])
    assert (row.status, row.error) == (200, "worker_lost")
    assert 200 <= row.billed_ms <= open_ms


def test_messages_that_are_too_large_end_it(system: System) -> None:
    with opened(system) as socket:
        socket.send(bytes(65_537))
        assert ended(socket)[0] == 1009
    with opened(system) as socket:
        socket.send("large")
        assert ended(socket)[0] == 1009


def test_a_deadline_ends_it(system: System) -> None:
    # The worker serves another socket already: all of the time is the socket's, none of it a start's.
    with (
        opened(system) as other,
        opened(system, additional_headers={"fs-timeout-s": "1.5", "x-request-id": "late"}) as socket,
    ):
        assert ended(socket) == (1008, "open for the 1.5 s that it may be")
        other.send("open")
        assert other.recv(timeout=10) == "open"
    assert row_of(system, "late").error == "deadline_exceeded"


def test_who_is_refused_hears_it_in_the_handshake(system: System) -> None:
    for path, status, code in (
        ("/fn/app/refuse", 403, "socket_refused"),
        ("/fn/nothing", 404, "not_found"),
        ("/fn/awaits", 400, "socket_refused"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            opened(system, path)
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["code"] == code
    with pytest.raises(InvalidStatus):
        opened(system, "/api/v1/status")
    assert system.ok("awaits", {}) == "free"


def release(socket: ClientConnection) -> str | None:
    socket.send("where")
    told: str | None = json.loads(socket.recv(timeout=10))[2]
    return told


def test_a_socket_stays_with_its_version_until_its_worker_is_drained(system: System) -> None:
    system.deploy(APP, name="drained")
    with opened(system, "/fn/drained") as old:
        system.deploy(APP, name="drained", options=("--env", "RELEASE=2"))
        with opened(system, "/fn/drained") as new:
            assert (release(old), release(new)) == (None, "2")
            system.fs("rm", "drained", "--yes")
            assert ended(new) == (1012, "its worker is drained: connect again")
            assert ended(old)[0] == 1012


# ── everything else of an app ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "PROPFIND", "OPTIONS"])
def test_any_method_path_query_and_body_reach_the_app_as_they_are(system: System, method: str) -> None:
    body = bytes(range(256)) * 20
    path = "/a%2Fb//c;d=%E2%82%AC/?q=%20+&q=&=x"
    answer = system.http.request(method, f"/fn/app{path}", content=body)
    assert answer.status_code == 207
    raw_path, _, query = path.partition("?")
    assert answer.content.split(b"\n", 3) == [method.encode(), raw_path.encode(), query.encode(), body[::-1]]
    assert answer.headers.get_list("set-cookie") == [f"{pair}; Path=/fn/app" for pair in ("a=1", "b=2")]


# ── settings ───────────────────────────────────────────────────────────────────────────────────────

LIMITED = """
from fleetstart.runtime import Limits, Scale, function

@function(memory="64MiB", limits=Limits(rate=100, concurrent=5), queue_timeout_s=3, scale=Scale(max=1))
def limited(text: str = ""):
    return len(text)
"""


def test_limits_come_from_decorator_file_and_flags_and_change_without_a_deploy(system: System) -> None:
    handler = system.source(LIMITED, folder="limited")
    handler.with_name("fs.toml").write_text('max_body = "1KiB"\n[limits]\nrate = 0.01\n')
    system.deploy_file(handler, "--burst", "2", "--cors", "https://app.example.com")
    spec = system.info("limited").spec
    assert spec.limits == Limits(rate=0.01, burst=2, concurrent=5)
    assert (spec.queue_timeout_s, spec.max_body_bytes, spec.cors) == (3, 1024, ["https://app.example.com"])
    assert [system.call("limited", {}).status_code for _ in range(3)] == [200, 200, 429]
    assert system.call("limited", {"text": "x" * 1024}).status_code == 413
    assert "0.01 calls a second at most (at once: 2), 5 calls at a time at most" in system.fs("scale", "limited").out
    assert "calls a second" not in system.fs("scale", "limited", "--rate", "0").out
    wait_until(lambda: system.call("limited", {}).status_code == 200, what="no limit any more")
    shown = json.loads(system.fs("scale", "limited", "--reset", "--json").out)
    assert (shown["rate"], shown["burst"], shown["concurrent"], shown["max"]) == (0.01, 2, 5, 1)
    assert "cors" in system.fs("config", "show", str(handler)).out


# ── clients that leave ─────────────────────────────────────────────────────────────────────────────


def leave(system: System, name: str, body: Any) -> str:
    """Leaves after the first bytes of a stream, or once the handler of a call without any has begun; returns the
    request's id."""
    request = f"left-{name.replace('/', '-')}-{time.monotonic_ns()}"
    headers = {"x-request-id": request}
    if "nap_s" not in body:
        with system.http.stream("POST", f"/fn/{name}", json=body, headers=headers, timeout=20) as answer:
            next(answer.iter_raw())
        return request
    host, _, port = system.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("POST", f"/fn/{name}", json.dumps(body), {"content-type": "application/json", **headers})
    logged(system, name, "awaits has begun")
    connection.close()
    return request


@pytest.mark.parametrize(
    ("name", "body", "word"),
    [
        ("awaits", {"nap_s": 60}, "awaits was cancelled"),
        ("yields", {"endless": True}, "yields was closed"),
        ("ayields", {"endless": True}, "ayields was closed"),
        ("app/wait", {}, "app heard http.disconnect"),
    ],
)
def test_a_client_that_leaves_ends_its_work_on_the_worker(
    system: System, name: str, body: dict[str, Any], word: str
) -> None:
    function = name.partition("/")[0]
    watch = Stopwatch()
    request = leave(system, name, body)
    logged(system, function, word)
    row = row_of(system, request)
    assert (row.status, row.error) == (499, "client_gone")
    assert row.billed_ms <= watch.elapsed_s * 1000
    assert system.http.post(f"/fn/{function}", json={}, timeout=10).status_code in (200, 207), "its slot is free"


def test_a_socket_that_is_left_unopened_gives_its_turn_back(system: System) -> None:
    with opened(system) as one, opened(system) as two, opened(system) as three, opened(system) as four:
        with pytest.raises(TimeoutError):
            opened(system, open_timeout=0.5, additional_headers={"x-request-id": "unopened"})
        for socket in (one, two, three, four):
            socket.send("here")
            assert socket.recv(timeout=10) == "here"
        row = row_of(system, "unopened")
        assert (row.status, row.error, row.billed_ms) == (499, "client_gone", 0)
        answer = system.http.get("/fn/app", headers={"fs-queue-timeout-s": "0"})
        assert answer.status_code == 429
        assert error_in(answer).wait is not None
