"""The egress proxy over real sockets: forwarding, rejections, limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import ipaddress
import socket
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from fleetstart.prefetcher.concurrency.threads import IoThread
from fleetstart.prefetcher.network.egress_proxy import (
    LOGGED_REJECTIONS_MOST,
    EgressLimits,
    EgressTraffic,
    NodeEgress,
    egress_limits,
)
from fleetstart.prefetcher.network.platform_addresses import PlatformAddresses, platform_hosts
from tests.prefetcher.peer import Peer
from tests.servers import wait_until

LONG = "x" * 40_000


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


class ProxyUnderTest:
    """An egress proxy as its worker sees it."""

    def __init__(self, entries: list[str], bounds: EgressLimits, platform: PlatformAddresses) -> None:
        self._loop = asyncio.new_event_loop()
        self._said: list[str] = []
        self.side = IoThread()
        self.own = EgressTraffic()
        self.egress = NodeEgress(bounds, self.side, platform)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.end = self._loop.run_until_complete(self._open(listener, entries))

    async def _open(self, listener: socket.socket, entries: list[str]) -> Callable[[], None]:
        return self.egress.open(listener, entries, self._said.append, self.own)

    @property
    def said(self) -> list[str]:
        self._loop.run_until_complete(asyncio.sleep(0))
        return self._said

    def socket(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(20)
        return sock

    def says(self, request: bytes, *, end: bool = False) -> bytes:
        """The whole answer."""
        with self.socket() as sock:
            sock.sendall(request)
            if end:
                sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    def tunnel(self, host: str, port: int) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.set_tunnel(host, port)
        return connection

    def close(self) -> None:
        self.side.close()
        self._loop.close()


def read_all(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(65536):
            said += more
    return said


OpenProxy = Callable[..., ProxyUnderTest]


@pytest.fixture
def open_egress(peer: Peer) -> Iterator[OpenProxy]:
    """Opens proxies; by default their list allows the peer alone, as their operator does."""
    opened: list[ProxyUnderTest] = []

    def open_proxy(*entries: str, platform: PlatformAddresses | None = None, **bounds: Any) -> ProxyUnderTest:
        platform = platform or PlatformAddresses({}, allowed=(ipaddress.ip_network("127.0.0.1"),))
        opened.append(ProxyUnderTest(list(entries) or [f"127.0.0.1:{peer.port}"], EgressLimits(**bounds), platform))
        return opened[-1]

    yield open_proxy
    for one in opened:
        one.close()


# ── what passes ────────────────────────────────────────────────────────────────────────────────────


def test_a_tunnel_carries_both_ways(open_egress: OpenProxy, peer: Peer) -> None:
    out = open_egress()
    connection = out.tunnel("127.0.0.1", peer.port)
    connection.request("POST", "/x", body=b"y" * 300_000)
    answer = connection.getresponse().read()
    connection.close()
    assert answer == b"POST /x HTTP/1.1|" + b"y" * 300_000
    assert out.egress.traffic.sent_bytes > 300_000
    assert out.egress.traffic.received_bytes > 300_000
    own, of_node = out.own, out.egress.traffic
    assert (own.sent_bytes, own.received_bytes) == (of_node.sent_bytes, of_node.received_bytes), "one worker's are all"
    assert out.said == []


@pytest.mark.parametrize("client", ["httpx", "urllib"])
def test_plain_http_passes_by_whole_urls(open_egress: OpenProxy, peer: Peer, client: str) -> None:
    out, url = open_egress(), f"http://127.0.0.1:{peer.port}/path?q=1"
    if client == "httpx":
        with httpx.Client(proxy=out.url) as http_client:
            answers = [http_client.post(url, content=LONG).content for _ in range(2)]
    else:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": out.url}))
        answers = [opener.open(url, data=LONG.encode(), timeout=20).read() for _ in range(2)]
    assert answers == [f"POST /path?q=1 HTTP/1.1|{LONG}".encode()] * 2


def test_a_listed_name_leads_to_a_private_address_that_is_listed_too(open_egress: OpenProxy, peer: Peer) -> None:
    listed = open_egress(f"localhost:{peer.port}", f"127.0.0.0/8:{peer.port}")
    connection = listed.tunnel("localhost", peer.port)
    connection.request("GET", "/")
    assert connection.getresponse().read() == b"GET / HTTP/1.1|"
    connection.close()

    alone = open_egress(f"localhost:{peer.port}")
    answer = alone.says(b"CONNECT localhost:%d HTTP/1.1\r\n\r\n" % peer.port)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"no public address" in answer


def test_what_was_sent_ahead_of_the_answer_is_not_lost(open_egress: OpenProxy, peer: Peer) -> None:
    answer = open_egress().says(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\nGET /early HTTP/1.1\r\n\r\n" % peer.port)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"GET /early HTTP/1.1|")


# ── what is refused ────────────────────────────────────────────────────────────────────────────────


def test_a_refusal_names_host_port_and_list_and_is_told_once(open_egress: OpenProxy) -> None:
    out = open_egress("api.example.com", "*.example.org:8443")
    for _ in range(3):
        answer = out.says(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n").decode()
        assert answer.startswith("HTTP/1.1 403 Forbidden: evil.example:443 is not in the list")
        assert answer.endswith("this function may reach: api.example.com, *.example.org:8443\n")
    assert len(out.said) == 1
    assert "evil.example:443" in out.said[0]
    assert out.egress.traffic.rejected == 3

    with httpx.Client(proxy=out.url) as client, pytest.raises(httpx.ProxyError, match=r"evil\.example:443"):
        client.get("https://evil.example/")
    with httpx.Client(proxy=out.url) as client:
        assert client.post("http://evil.example/", content=LONG).status_code == 403


def test_a_log_is_not_flooded_with_refusals(open_egress: OpenProxy) -> None:
    out = open_egress("api.example.com")
    for number in range(LOGGED_REJECTIONS_MOST + 5):
        out.says(b"CONNECT h%d.example:443 HTTP/1.1\r\n\r\n" % number)
    assert len(out.said) == LOGGED_REJECTIONS_MOST + 1
    assert "more" in out.said[-1]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "[::ffff:127.0.0.1]", "0.0.0.0", "[::1]", "169.254.169.254"])
def test_this_machine_is_not_reached_by_any_of_its_names(open_egress: OpenProxy, peer: Peer, host: str) -> None:
    out = open_egress(f"0.0.0.0/0:{peer.port}", f"[::/0]:{peer.port}")
    answer = out.says(f"CONNECT {host}:{peer.port} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "an address of Redis"),
        ("localhost", "loopback"),
        ("127.0.0.7", "the node's loopback"),
        ("169.254.169.254", "metadata"),
        ("[fd00:ec2::254]", "metadata"),
        ("10.1.2.3", "an address of this node"),
        ("10.9.9.9", "an address of a controller"),
        ("10.7.0.1", "FS_EGRESS_DENY"),
    ],
)
def test_no_list_reaches_the_platform_or_what_the_operator_denies(
    open_egress: OpenProxy, peer: Peer, host: str, why: str
) -> None:
    hosts = platform_hosts("redis://:secret@localhost:6379/0", "10.1.2.3", "https://10.9.9.9:7443")
    platform = PlatformAddresses(hosts, operator=(ipaddress.ip_network("10.7.0.0/16"),))
    entries = [f"{host}:{peer.port}", f"127.0.0.0/8:{peer.port}", f"[::1]:{peer.port}"]
    out = open_egress(*entries, platform=platform)
    answer = out.says(f"CONNECT {host}:{peer.port} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403 ")
    (line,) = out.said
    assert "is denied by this node, whatever a list says" in line
    assert why in line or host == "localhost"


def test_an_operator_opens_exactly_what_he_names(open_egress: OpenProxy, peer: Peer) -> None:
    request = b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n" % peer.port
    for allowed, opened in (("127.0.0.1/32", True), ("127.0.0.0/8", False)):
        platform = PlatformAddresses({}, allowed=(ipaddress.ip_network(allowed),))
        assert open_egress(platform=platform).says(request).endswith(b"|") == opened


def test_nobody_there_is_told(open_egress: OpenProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert (
        open_egress(f"127.0.0.1:{port}")
        .says(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % port)
        .startswith(b"HTTP/1.1 502 ")
    )
    answer = open_egress("nobody.invalid").says(b"CONNECT nobody.invalid:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 502 ", b"HTTP/1.1 504 "))  # what name servers say of it, if there are any


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT nowhere HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT 127.0.0.1:0 HTTP/1.1\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01" + b"\0" * 400 + b"\r\n\r\n", 400),
        (b"GET http://a.example/ HTTP/1.1\r\nX: " + b"x" * 100_000, 431),
        (b"A" * 1_000_000, 431),
        (b"CONNECT api.example.com:443 HTTP/1.1\r\n", 408),
        (b"CONNECT api.example.com:443 HTTP/1.1\n\n", 408),
        (b"C", 408),
    ],
)
def test_what_is_no_request_gets_an_answer_and_the_next_is_served(
    open_egress: OpenProxy, peer: Peer, request_: bytes, status: int
) -> None:
    out = open_egress(head_s=0.3 if status == 408 else 20.0)
    with contextlib.suppress(ConnectionError):
        assert out.says(request_).startswith(b"HTTP/1.1 %d " % status)
    assert out.says(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n" % peer.port).endswith(b"|")


def test_who_says_nothing_and_leaves_costs_nothing(open_egress: OpenProxy) -> None:
    out = open_egress()
    for request in (b"", b"CONNECT"):
        assert out.says(request, end=True) == b""
    wait_until(lambda: out.egress.traffic.open == 0, what="no connection")


# ── limits ─────────────────────────────────────────────────────────────────────────────────────────


def hold(out: ProxyUnderTest, peer: Peer) -> socket.socket:
    before = len(peer.held)
    sock = out.socket()
    sock.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\nHOLD\r\n\r\n" % peer.port)
    assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: len(peer.held) > before, what="the connection at its peer")
    return sock


@pytest.mark.parametrize("bound", ["connections", "connections_of_node"])
def test_one_connection_too_many_is_told_so_and_there_is_room_when_one_ends(
    open_egress: OpenProxy, peer: Peer, bound: str
) -> None:
    out = open_egress(**{bound: 2})
    with hold(out, peer):
        with hold(out, peer):
            answer = out.says(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % peer.port)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"2 connections" in answer
        peer.held[1].close()
        wait_until(lambda: out.egress.traffic.open == 1, what="one connection")
        hold(out, peer).close()


def test_a_node_with_few_descriptors_keeps_most_of_them() -> None:
    assert egress_limits(65_536) == EgressLimits()
    assert egress_limits(1024) == EgressLimits(connections=128, connections_of_node=128)
    assert egress_limits(256) == EgressLimits(connections=32, connections_of_node=32)


def test_a_connection_over_which_nothing_goes_ends(open_egress: OpenProxy, peer: Peer) -> None:
    with hold(open_egress(idle_s=0.2), peer) as sock:
        assert read_all(sock) == b""
        assert peer.is_left()


def test_each_side_may_have_said_its_last_before_the_other(open_egress: OpenProxy, peer: Peer) -> None:
    with hold(open_egress(), peer) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert peer.is_left()
        peer.held[0].sendall(b"still here")
        peer.held[0].shutdown(socket.SHUT_WR)
        assert read_all(sock) == b"still here"


def test_everything_ends_with_the_worker_and_with_the_node(open_egress: OpenProxy, peer: Peer) -> None:
    for index, how in enumerate(("worker", "node")):
        out = open_egress()
        with hold(out, peer) as sock:
            out.end() if how == "worker" else out.side.close()
            assert read_all(sock) == b""
            assert peer.is_left(index)
        wait_until(functools.partial(refuses, out.port), what="the end of the listener")


def refuses(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0
