"""Limits on what a client may send before its request is known: a head's bytes, headers and time; connections."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from fleetstart.controller import http_server
from fleetstart.controller.http import connection_limits
from fleetstart.controller.http.asgi import Receive, Scope, Send
from fleetstart.controller.http.connection_limits import (
    DESCRIPTORS_RESERVED,
    HEAD_MAX_BYTES,
    PIPELINED_MAX,
    connections_max,
)
from fleetstart.controller.http_server import Listener, UvicornServer
from tests.controller.conftest import ControllerProcess
from tests.servers import NO_CERTIFICATES, RedisServer, wait_until

App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await _read(receive)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body and the names of the headers, in two pieces."""
    body = await _read(receive)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"<%b>" % body, "more_body": True})
    names = b" ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.body", "body": b"(%b)" % names})


@contextmanager
def _serving(app: App = _app) -> Iterator[int]:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    port = sock.getsockname()[1]
    config = uvicorn.Config(
        app, http="httptools", lifespan="off", interface="asgi3", log_config=None, timeout_keep_alive=1
    )
    server = UvicornServer(config, [Listener(sock)])
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        wait_until(lambda: server.started, what="the server")
        yield port
    finally:
        server.should_exit = True
        thread.join(20)


def _answer(port: int, request: bytes, *, then: bytes = b"", timeout_s: float = 10) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        with suppress(ConnectionError):
            client.sendall(request)
        if then:
            client.sendall(then)
        parts = []
        with suppress(ConnectionError):
            while part := client.recv(65536):
                parts.append(part)
        return b"".join(parts)


def test_a_head_without_end_is_refused() -> None:
    with _serving() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
            sent = 0
            with suppress(ConnectionError):
                while sent < 1024 * HEAD_MAX_BYTES:
                    client.sendall(b"y" * 4096)
                    sent += 4096
        assert sent < 1024 * HEAD_MAX_BYTES, "it was read on and on"
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "ok"


def test_a_long_head_and_many_headers_hear_431() -> None:
    with _serving() as port:
        # In two parts, because what one read brings is parsed before it is counted.
        first = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * HEAD_MAX_BYTES
        answer = _answer(port, first, then=b"z" * HEAD_MAX_BYTES)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"headers_too_large"' in answer
        many = b"".join(b"X-%d: 1\r\n" % number for number in range(300))
        answer = _answer(port, b"POST / HTTP/1.1\r\nContent-Length: 3\r\n" + many + b"\r\nabc")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"301 headers; 256 are allowed" in answer


def test_a_head_has_a_time_also_on_a_connection_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.3)
    with _serving() as port:
        late = _answer(port, b"GET / HT")
        assert late.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"\r\nx-should-retry: false\r\n" in late, "clients repeat a 408 that does not say so"
        assert _answer(port, b"") == b"", "who asked nothing is not answered"
        answer = _answer(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", then=b"GET / HTTP/1.1\r\nHo")
        assert (answer.count(b" 200 "), answer.count(b" 408 ")) == (1, 1)
        slow_body = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\na"
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(slow_body)
            client.settimeout(0.6)
            with pytest.raises(TimeoutError):
                client.recv(100)
            client.sendall(b"b")
            client.settimeout(10)
            assert b" 200 " in client.recv(1000), "a body has the time of its call"


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
ONE_CHUNK = b"5\r\nhello\r\n0\r\n"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"Host: a\r\nHost: a\r\n", "2 Host headers"),
        (b"Host: a\r\nHost: b\r\n", "2 Host headers"),
        (b"X: y\r\n", "no Host headers"),
        (b"Host: a b\r\n", "its Host is none"),
        (b"Host: a, b\r\n", "its Host is none"),
        (b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", "Transfer-Encoding"),
        (b"Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", "Content-Length"),
        (b"Host: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n", "Content-Length"),
        (b"Host: a\r\nX Y: z\r\n", "Invalid header token"),
        (b"Host: a\r\nX: y\r\n folded\r\n", "header"),
    ],
)
def test_a_head_that_another_server_may_read_in_another_way_is_refused(head: bytes, said: str) -> None:
    with _serving() as port:
        answer = _answer(port, b"POST / HTTP/1.1\r\n" + head + b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "refused"
    assert said in error["message"]


@pytest.mark.parametrize(
    ("version", "headers", "fault"),
    [
        ("1.1", [(b"host", b"a.example:80")], ""),
        ("1.1", [(b"host", b"[::1]:80")], ""),
        ("1.1", [(b"host", b"")], ""),
        ("1.0", [], ""),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"Chunked")], ""),
        ("1.0", [(b"transfer-encoding", b"chunked")], "Transfer-Encoding"),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], "Transfer"),
        ("2.0", [(b"host", b"a")], "HTTP/2.0"),
    ],
)
def test_a_head_is_checked_by_its_version(version: str, headers: list[tuple[bytes, bytes]], fault: str) -> None:
    assert fault in (found := connection_limits.head_fault(version, headers))
    assert bool(found) is bool(fault)


def test_what_is_no_request_does_not_come_between_an_earlier_one_and_its_answer() -> None:
    request = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
    for behind in (b"\x00garbage\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX Y: z\r\n\r\n"):
        with _serving() as port:
            answer = _answer(port, request + behind)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\nok"), "and then it ends"


def test_trailers_are_no_headers() -> None:
    with _serving(_echo) as port:
        request = CHUNKED + b"Connection: close\r\n\r\n" + ONE_CHUNK + b"Authorization: Bearer x\r\nX-Late: 1\r\n\r\n"
        answer = _answer(port, request)
        assert b"<hello>" in answer
        assert b"(host transfer-encoding connection)" in answer


def test_trailers_without_end_are_refused() -> None:
    with _serving() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(CHUNKED + b"\r\n" + ONE_CHUNK)
            sent = 0
            with suppress(ConnectionError):
                while sent < 1024 * HEAD_MAX_BYTES:
                    client.sendall(b"X-Late: %b\r\n" % (b"y" * 4096))
                    sent += 4096
        assert sent < 1024 * HEAD_MAX_BYTES, "they were read on and on"
        answer = _answer(port, CHUNKED + b"\r\n" + ONE_CHUNK + b"X-Late: 1\r\n" * 20_000)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "ok"


@pytest.mark.parametrize("apart", [False, True])
def test_an_upgrade_that_is_not_taken_loses_no_body(apart: bool) -> None:
    """Java's HttpClient and `curl --http2` ask for HTTP/2 in that way."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    sized = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + upgrade + b"\r\n"
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    parts = [sized, b"hello", CHUNKED + upgrade + b"\r\n", ONE_CHUNK + b"\r\n", last]
    with _serving(_echo) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        answer = b""
        for part in parts if apart else [b"".join(parts)]:
            client.sendall(part)
            if apart and part != parts[-1] and b"hello" in part:
                answer += client.recv(65536)
        while piece := client.recv(65536):
            answer += piece
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b"<hello>") == 2
    assert answer.count(b"<>") == 1


@pytest.mark.parametrize("begin", [b"POST / HTTP/1.1", b"GET / HTTP/1.0"])
def test_what_cannot_become_a_websocket_is_answered(begin: bytes) -> None:
    upgrade = b"Host: x\r\nContent-Length: 5\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\nhello"
    with _serving(_echo) as port:
        assert b"<hello>" in _answer(port, begin + b"\r\n" + upgrade)
        assert _answer(port, b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_chunks_are_not_sent_to_a_client_that_does_not_know_them(method: bytes) -> None:
    with _serving(_echo) as port:
        head, _, body = _answer(port, method + b" / HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == (b"<>()" if method == b"GET" else b"")


def test_a_call_is_told_that_its_client_has_left_also_if_another_request_waited_behind_it() -> None:
    heard: list[str] = []
    begun = threading.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        begun.set()
        heard.append((await receive())["type"])

    with _serving(waits) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
            assert begun.wait(10)
        wait_until(lambda: heard, what="the disconnect")
    assert heard == ["http.disconnect"]


def test_no_more_than_some_requests_wait_behind_the_one_that_is_answered() -> None:
    """Each takes memory, before its key is known. Those that are not answered are sent again by their client."""
    with _serving() as port:
        answer = _answer(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2000)
        assert answer.count(b"HTTP/1.1 200 ") == 1 + PIPELINED_MAX
        assert answer.endswith(b"ok")
        last = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        whole = _answer(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * PIPELINED_MAX + last)
        assert whole.count(b"HTTP/1.1 200 ") == 1 + PIPELINED_MAX


def test_a_request_that_waited_behind_another_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "connections_max", lambda _: 1)
    begun, release = threading.Event(), threading.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/second":
            begun.set()
            while not release.is_set():
                await asyncio.sleep(0.01)
        await _app(scope, receive, send)

    with _serving(waits) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        close = b"GET /second HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        client.sendall(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n" + close)
        assert begun.wait(10)
        assert _answer(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") == b"", "there is no room for another"
        release.set()
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert answer.count(b"HTTP/1.1 200 ") == 2


def test_each_call_may_have_two_descriptors() -> None:
    assert connections_max(1024) == (1024 - DESCRIPTORS_RESERVED) // 2
    assert connections_max(64) == 16


class _FewDescriptors(ControllerProcess):
    command = ("prlimit", "--nofile=336:336", sys.executable, "-m", "fleetstart.controller")


def test_silent_connections_give_way_to_requests(tmp_path: Path, redis_server: RedisServer) -> None:
    """More than the process could hold: each request is still answered, and the lease is kept."""
    controller = _FewDescriptors(tmp_path / "home", redis_server.url)
    silent: list[socket.socket] = []
    try:
        controller.start()
        address = controller.socket.getsockname()
        for _ in range(400):
            silent.append(socket.create_connection(address, timeout=5))
        for _ in range(20):
            with httpx.Client(base_url=controller.url, timeout=10, verify=NO_CERTIFICATES) as client:
                assert client.get("/healthz").status_code == 200
                assert client.get("/api/v1/status").json()["redis"] == "ok"
    finally:
        for client_socket in silent:
            client_socket.close()
        controller.close()
