"""Calls to workers on other machines: encrypted, for controllers alone, and for no node that was removed."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from fleetstart.runtime.contract.identity import client_context, node_host, read_identity
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.worker_headers import TOKEN_HEADER
from tests.servers import wait_until
from tests.testbed import Testbed

pytestmark = [pytest.mark.e2e, pytest.mark.bed]

HANDLER = """
from collections.abc import Iterator

from fleetstart.runtime import Scale, function


@function(name="{name}", concurrency=8, scale=Scale(min=1, max=1), region=["{region}"])
def answer(size: int) -> Iterator[str]:
    for _ in range(size):
        yield "Z" * 1000
"""
OTHERS = """
from fleetstart.runtime import Scale, call, function


async def echo(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"up"})
        return
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


socket = function(echo, name="socket", concurrency=4, region=["node-0"])


@function(name="callee", region=["node-1"])
def callee(text: str) -> str:
    return text[::-1]


@function(name="caller", calls=["callee"], region=["node-0"])
def caller(text: str) -> str:
    return call("callee", text=text)
"""
CALL_S = 30.0


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    bed = Testbed(nodes=2, mbit=0, env={"FS_PROFILES": "python"})
    for node in bed.nodes:
        node.env["FS_REGION"] = node.name
    with bed:
        for node in bed.nodes:
            deploy(bed, node.name)
        yield bed


def deploy(bed: Testbed, region: str) -> None:
    folder = bed.folder / f"on-{region}"
    folder.mkdir(exist_ok=True)
    handler = folder / "handler.py"
    handler.write_text(HANDLER.format(name=f"on-{region}", region=region))
    bed.fs("deploy", str(handler))


def call(bed: Testbed, region: str, size: int = 1) -> int:
    answer = bed.http.post(f"/fn/on-{region}", json={"size": size}, timeout=CALL_S)
    assert answer.status_code == 200, answer.text
    return answer.text.count("Z")


def worker(bed: Testbed, region: str) -> WorkerStatus:
    return wait_until(lambda: [one for one in bed.workers(f"on-{region}") if one.endpoint], what="a worker")[0]


def dial(bed: Testbed, host: str, endpoint: str) -> socket.socket:
    address, _, port = endpoint.rpartition(":")
    link = bed.network.socket(host)
    link.settimeout(10)
    link.connect((address, int(port)))
    return link


def request(status: WorkerStatus) -> bytes:
    return f"POST / HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {status.token}\r\nContent-Length: 0\r\n\r\n".encode()


def read_all(link: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := link.recv(4096):
            found += data
    return found


def test_calls_and_streams_go_through_tls(bed: Testbed) -> None:
    for node in bed.nodes:
        assert call(bed, node.name) == 1000
        assert worker(bed, node.name).endpoint.startswith(node.address), "others reach the node, not the worker"
    assert call(bed, "node-1", size=2000) == 2_000_000


def test_websockets_and_calls_between_functions_go_through_tls(bed: Testbed) -> None:
    handler = bed.folder / "others" / "handler.py"
    handler.parent.mkdir()
    handler.write_text(OTHERS)
    for name in ("socket", "callee", "caller"):
        bed.fs("deploy", f"{handler}:{name}", "--name", name)
    with connect(bed.url.replace("http", "ws") + "/fn/socket/", proxy=None) as link:
        for text in ("one", "two" * 10_000):
            link.send(text)
            assert link.recv(CALL_S) == text
    answer = bed.http.post("/fn/caller", json={"text": "abc"}, timeout=CALL_S)
    assert answer.status_code == 200, answer.text
    assert "cba" in answer.text


def test_a_token_is_of_no_use_without_a_certificate(bed: Testbed) -> None:
    """The token of a worker, as one that listens on the network might have seen it before."""
    status = worker(bed, "node-0")
    with dial(bed, "node-1", status.endpoint) as plain:
        plain.sendall(request(status))
        assert b"HTTP/1" not in read_all(plain)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with anonymous.wrap_socket(dial(bed, "node-1", status.endpoint)) as link, contextlib.suppress(OSError):
        link.sendall(request(status))
        assert b"HTTP/1" not in read_all(link)


def test_another_node_is_no_controller(bed: Testbed) -> None:
    status, thief = worker(bed, "node-0"), bed.node(1)
    identity = read_identity(thief.home / "node" / "identity.json")
    assert identity is not None
    record = bed.status().certificates
    assert {one.node for one in record} == {"node-0", "node-1"}
    context = client_context(identity, check_hostname=False)
    with context.wrap_socket(dial(bed, "node-1", status.endpoint)) as link, contextlib.suppress(OSError):
        link.sendall(request(status))
        assert b"HTTP/1" not in read_all(link)
    wait_until(lambda: "not of a controller" in bed.node(0).log(), what="the refusal in the node's log")


@pytest.mark.isolations("namespaces", "container", why="files inside gVisor are not seen from outside")
def test_a_worker_sees_no_key_of_its_node(bed: Testbed, tmp_path: Path) -> None:
    node = bed.node(0)
    identity = read_identity(node.home / "node" / "identity.json")
    assert identity is not None
    pid = node.pid_of(worker(bed, "node-0"))
    assert identity.key.encode()[40:80] not in Path(f"/proc/{pid}/environ").read_bytes()
    assert not Path(f"/proc/{pid}/root{node.home}/node/identity.json").exists()


def test_the_certificates_are_shown(bed: Testbed) -> None:
    shown = bed.fs("nodes").out
    assert shown.count("certificate until ") == 2
    assert "renewed by itself" in shown


def test_a_removed_node_is_reached_no_more(bed: Testbed) -> None:
    """It lives on, has its key, the password of Redis, and a worker that it reports."""
    assert call(bed, "node-1") == 1000
    before = node_host("node-1", "x")
    bed.fs("node", "remove", "node-1", "--force")
    wait_until(lambda: [one.node for one in bed.status().certificates] == ["node-0"], what="one certificate less")
    answer = bed.http.post("/fn/on-node-1", json={"size": 1}, headers={"Fs-Timeout": "2"}, timeout=CALL_S)
    assert answer.status_code in (503, 504), answer.text
    assert call(bed, "node-0") == 1000
    assert before != node_host("node-1", "y")
