"""Requests that no client should send: refused quickly, in our words, with nothing read, run or lost."""

from __future__ import annotations

import json
import socket

import pytest

from tests.e2e.systems import System
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("unharmed")

LIMIT_S = 5.0


def raw(system: System, request: bytes, *, timeout_s: float = LIMIT_S) -> bytes:
    """Sends bytes, returns whatever comes until the server closes or is silent."""
    host, _, port = system.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as sock:
        sock.sendall(request)
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except TimeoutError:
            pass
        return answer


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer[9:12])


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]).encode(
        "latin-1"
    )


def test_an_unknown_function_is_told_its_nearest_name(system: System) -> None:
    status, error = system.failed("wel", {})
    assert (status, error.code) == (404, "not_found")
    assert "well" in error.hint
    ran = system.fs("invoke", "wel", "{}", "--json", code=3)
    assert "well" in ran.error.hint


def test_an_unknown_version(system: System) -> None:
    assert system.failed("well@99", {})[0] == 404
    assert system.failed("well@1x", {})[0] == 404
    assert system.failed("well@" + "9" * 400, {})[0] == 404


def test_a_body_of_one_gib_is_refused_before_it_is_read(system: System) -> None:
    head = f"POST /fn/well HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 30}\r\n\r\n".encode()
    watch = Stopwatch()
    answer = raw(system, head + bytes(100_000))
    assert status_of(answer) == 413
    assert watch.unhindered_s < LIMIT_S
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_large"
    assert b"connection: close" in answer.lower()


def test_a_body_without_end_is_refused_while_it_comes(system: System) -> None:
    """Chunked, so it cannot be told beforehand how much will come. Sent until the server has had enough."""
    host, _, port = system.url.removeprefix("http://").partition(":")
    piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    sent = 0
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /fn/well HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 1 << 30:
                sock.sendall(piece)
                sent += 1 << 20
        except (ConnectionError, TimeoutError):
            pass
    assert sent < 300 << 20
    assert _resident_bytes(system.one("controller").pid) < 500 << 20


def test_a_client_is_told_why_its_large_body_was_refused(system: System) -> None:
    response = system.http.post("/fn/well", content=iter([bytes(1 << 20)] * 80))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


@pytest.mark.parametrize(
    "path",
    [
        "/fn/../../etc/passwd",
        "/fn/../api/v1/status",
        "/fn/%2e%2e/%2e%2e/etc/passwd",
        "/fn/..%2f..%2fetc%2fpasswd",
        "/fn//etc/passwd",
        "/fn/",
        "/fn",
        "/fn/well\x01",
        "/fn/%00",
        "/fn/%ff%fe",
        "/fn/" + "a" * 5000,
        "/api/v1/objects/../../../etc/passwd",
        "/api/v1/objects/bundles/..%2f..%2f..%2fetc%2fpasswd",
        "/api/v1/objects/checkpoints/%2e%2e/manifest.json",
        "/api/v1/functions/..%2fwell",
        "/api/v1/invocations/..%2f..",
    ],
)
def test_a_path_leads_nowhere_else(system: System, path: str) -> None:
    answer = raw(system, get(path))
    assert 400 <= status_of(answer) < 500, answer[:300]
    assert b"root:" not in answer


def test_an_upload_cannot_leave_the_store_or_lie_about_its_content(system: System) -> None:
    before = sorted(path for path in system.home.rglob("*") if "logs" not in path.parts and "redis" not in path.parts)
    for key in ("bundles/../../escaped", "bundles/..%2f..%2fescaped", "bundles/short", "other/" + "0" * 64):
        assert system.http.put(f"/api/v1/objects/{key}", content=b"x").status_code in (400, 404, 405)
    lie = system.http.put(f"/api/v1/objects/bundles/{'0' * 64}", content=b"not what it says")
    assert lie.status_code == 400
    after = sorted(path for path in system.home.rglob("*") if "logs" not in path.parts and "redis" not in path.parts)
    assert after == before


@pytest.mark.parametrize("sent", ["../../x", "a b", "x" * 300, "\x7f", "é", "", "a,b", "{}", "fs:ledger\\r\\nX: 1"])
def test_a_request_id_that_cannot_be_one_is_replaced(system: System, sent: str) -> None:
    answer = raw(system, get("/fn/well", f"X-Request-Id: {sent}"))
    if status_of(answer) == 400 and b"x-request-id" not in answer.lower():
        return  # the HTTP parser itself refused the header
    headers = dict(line.split(b": ", 1) for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    used = headers[b"x-request-id"].decode()
    assert used != sent
    assert used.startswith("inv-")


def test_headers_of_a_hundred_kilobytes(system: System) -> None:
    answer = raw(system, get("/fn/well", "X-Long: " + "y" * 100_000))
    assert answer == b"" or 400 <= status_of(answer) < 500 or status_of(answer) == 200
    # Many small ones are no better than one that is long.
    answer = raw(system, get("/fn/well", *(f"X-{number}: {'z' * 80}" for number in range(2000))))
    assert answer == b"" or 200 <= status_of(answer) < 500


def test_a_client_cannot_speak_for_the_gateway(system: System) -> None:
    """The headers by which gateway and worker know each other mean nothing from outside."""
    system.deploy(
        """
        from fleetstart.runtime import function

        async def mirror(scope, receive, send):
            names = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
            import json
            body = json.dumps({"path": scope["path"], "headers": names}).encode()
            headers = [(b"content-length", b"%d" % len(body)), (b"fs-cost", b"-1"), (b"fs-version", b"77")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        app = function(memory="64MiB")(mirror)
        """,
        name="mirror",
    )
    sent = {"fs-worker-token": "guess", "fs-deadline-ms": "99999999", "x-kept": "yes", "x-forwarded-proto": "gopher"}
    response = system.http.get("/fn/mirror/a/../b%2Fc", headers=sent)
    got = dict(response.json()["headers"])
    assert got["x-kept"] == "yes"
    assert "fs-worker-token" not in got
    assert (got["x-forwarded-for"], got["x-forwarded-proto"]) == ("127.0.0.1", "http")
    assert int(got["fs-deadline-ms"]) <= 300_000
    assert response.headers["fs-version"] == "1"
    assert "-1" not in response.headers["fs-cost"]


def test_a_caller_behind_a_proxy_is_not_this_machine(system: System) -> None:
    """The system is open for this machine alone, and a proxy here calls for others."""
    status, error = system.failed("well", **{"x-forwarded-for": "203.0.113.7"})
    assert (status, error.code) == (401, "unauthorized")


def test_garbage_instead_of_http(system: System) -> None:
    for garbage in (b"\x00" * 1000, b"\x16\x03\x01" + b"\xff" * 500, b"GET\r\n\r\n", b"HELO x\r\n\r\n", b"\n" * 5000):
        answer = raw(system, garbage, timeout_s=1.0)
        assert answer == b"" or status_of(answer) == 400


def test_two_lengths_are_not_smuggled(system: System) -> None:
    request = (
        b"POST /fn/well HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /fn/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    answer = raw(system, request, timeout_s=2.0)
    assert b"smuggled" not in answer
    assert answer.count(b"HTTP/1.1 ") <= 1


def test_many_connections_that_say_nothing(system: System) -> None:
    """Slow clients hold a socket each and nothing else."""
    host, _, port = system.url.removeprefix("http://").partition(":")
    idle = [socket.create_connection((host, int(port)), timeout=5) for _ in range(300)]
    try:
        for sock in idle:
            sock.sendall(b"POST /fn/well HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert system.ok("well", {"name": "Bob"}, timeout_s=10) == {"well": "Bob"}
    finally:
        for sock in idle:
            sock.close()


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
