"""Egress of running workers: allowed destinations, rejections, and its end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.prefetcher.nodes import Node, Store, call, spec_of
from tests.prefetcher.peer import Peer
from tests.servers import wait_until

HANDLER = """
import socket, urllib.error, urllib.request
HELD = []

def hello(port: int, what: str):
    if what == "hold":
        proxy = urllib.request.getproxies()["https"].rpartition(":")[2]
        sock = socket.create_connection(("127.0.0.1", int(proxy)))
        sock.sendall(b"CONNECT 127.0.0.2:%d HTTP/1.1\\r\\n\\r\\nHOLD\\r\\n\\r\\n" % port)
        HELD.append(sock)
        return sock.recv(100).decode()
    try:
        return urllib.request.urlopen(what, timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
"""


@pytest.fixture
def abroad() -> Iterator[Peer]:
    """An address of this machine that a worker's clients do not take for the worker's own loopback."""
    peer = Peer("127.0.0.2")
    yield peer
    peer.close()


def ask(status: Any, abroad: Peer, what: str) -> str:
    code, answer = call(status, b'{"port": %d, "what": "%s"}' % (abroad.port, what.encode()))
    assert code == 200, answer
    return answer.decode()


def test_a_worker_reaches_what_its_list_names_and_the_rest_stands_in_its_log(
    node: Node, store: Store, abroad: Peer
) -> None:
    before = node.lease()
    spec = spec_of(store.put_bundle({"handler.py": HANDLER}), network=[f"127.0.0.0/8:{abroad.port}"])

    status = node.wait_for(node.order(spec), "ready")

    assert status.pooled
    if not status.isolation:
        pytest.skip("this machine refuses namespaces: workers have its network")
    assert "net" in status.isolation.split(",")
    assert ask(status, abroad, f"http://127.0.0.2:{abroad.port}/x") == '"GET /x HTTP/1.1|"'
    for _ in range(2):
        assert "403" in ask(status, abroad, "http://evil.example/")
    refusals = wait_until(
        lambda: [line.text for line in node.log_lines("hello") if "evil.example" in line.text], what="its refusal"
    )
    assert len(refusals) == 1
    assert f"127.0.0.0/8:{abroad.port}" in refusals[0]
    wait_until(lambda: node.lease().egress_refused == before.egress_refused + 2, what="refusals in the node's report")
    assert node.lease().egress_bytes["in"] > before.egress_bytes.get("in", 0)


FORGER = """
import os, socket, urllib.request

def hello(url: str):
    return urllib.request.urlopen(url, timeout=20).read().decode()

mine = socket.create_server(("127.0.0.1", 0))
control = socket.socket(fileno=os.dup(3))
for descriptor in (mine.fileno(), os.pipe()[0]):
    socket.send_fds(control, [b'{"type":"outlet"}'], [descriptor])
"""


@pytest.mark.parametrize("listed", [True, False])
def test_a_socket_that_a_functions_code_hands_over_is_not_taken(
    node: Node, store: Store, abroad: Peer, listed: bool
) -> None:
    network = [f"127.0.0.2:{abroad.port}"] if listed else False
    before = node.log()
    status = node.wait_for(node.order(spec_of(store.put_bundle({"handler.py": FORGER}), network=network)), "ready")
    if not status.isolation:
        pytest.skip("this machine refuses namespaces: workers have its network")
    code, answer = call(status, b'{"url": "http://127.0.0.2:%d/x"}' % abroad.port)
    assert (code, answer) == (200, b'"GET /x HTTP/1.1|"') if listed else code == 500
    assert "failed" not in node.log().removeprefix(before)


@pytest.mark.parametrize("victim", ["worker", "daemon"])
def test_connections_end_with_a_worker_and_a_daemon_that_are_killed(
    node: Node, store: Store, abroad: Peer, victim: str
) -> None:
    spec = spec_of(store.put_bundle({"handler.py": HANDLER}), network=[f"127.0.0.2:{abroad.port}"])
    worker = node.order(spec)
    status = node.wait_for(worker, "ready")
    assert "200" in ask(status, abroad, "hold")
    wait_until(lambda: abroad.held, what="a connection that is held")
    if victim == "daemon":
        node.kill()
    else:
        node.take_back(worker)
    assert abroad.is_left()


TUNNEL = """
import socket, urllib.request

def hello(target: str) -> str:
    proxy = urllib.request.getproxies()["https"].rpartition(":")[2]
    with socket.create_connection(("127.0.0.1", int(proxy))) as sock:
        sock.sendall(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n".encode())
        return sock.recv(1000).decode()
"""


def test_a_list_that_names_the_platform_does_not_reach_it(node: Node, store: Store) -> None:
    """The node's loopback, on which its Redis and the API of an open system listen, and a cloud's metadata."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        targets = [f"127.0.0.1:{server.getsockname()[1]}", "169.254.169.254:80"]
        network = [target.replace(":", "/32:") for target in targets]
        spec = spec_of(store.put_bundle({"handler.py": TUNNEL}), network=network)
        status = node.wait_for(node.order(spec), "ready")
        for target in targets:
            code, answer = call(status, b'{"target": "%s"}' % target.encode())
            assert (code, answer[:20]) == (200, b'"HTTP/1.1 403 Forbid')

    def denied() -> list[str]:
        texts = [line.text for line in node.log_lines("hello") if "is denied by this node" in line.text]
        return [text.split()[1] for text in texts]

    wait_until(lambda: denied() == targets, what="the denials in the function's log")
