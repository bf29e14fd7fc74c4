"""Limits on what a client may send before its request is known: a head's bytes, headers and time; connections."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from fleetstart.controller.http import connection_limits
from fleetstart.controller.http.asgi import Receive, Scope, Send
from fleetstart.controller.http.connection_limits import DESCRIPTORS_RESERVED, HEAD_MAX_BYTES, connections_max
from fleetstart.controller.http_server import Listener, UvicornServer
from tests.controller.conftest import ControllerProcess
from tests.servers import NO_CERTIFICATES, RedisServer, wait_until


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def _serving() -> Iterator[int]:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    port = sock.getsockname()[1]
    config = uvicorn.Config(
        _app, http="httptools", lifespan="off", interface="asgi3", log_config=None, timeout_keep_alive=1
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
