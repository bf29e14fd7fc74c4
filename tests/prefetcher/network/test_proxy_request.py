"""Parser of proxy requests: the forwarded head names the checked server, and hostile input is rejected."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.network.proxy_request import END, BadProxyRequest, ProxyRequest, parse_request

TOKENS = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,10}", fullmatch=True)
VALUES = st.from_regex(r"[ -~]{0,20}", fullmatch=True)


def head(*lines: str) -> bytes:
    return "\r\n".join(lines).encode() + END


@pytest.mark.parametrize(
    ("target", "host", "port"),
    [
        ("api.example.com:443", "api.example.com", 443),
        ("API.example.com.:8443", "api.example.com", 8443),
        ("127.1:80", "127.0.0.1", 80),
        ("[2001:DB8::1]:443", "2001:db8::1", 443),
    ],
)
def test_connect_names_a_host_and_a_port(target: str, host: str, port: int) -> None:
    assert parse_request(head(f"CONNECT {target} HTTP/1.1", "Host: something.else")) == ProxyRequest(
        host=host, port=port
    )


def test_a_url_becomes_a_request_to_its_server() -> None:
    asked = parse_request(
        head(
            "POST http://Api.Example.com:8080/v1?q=a@b HTTP/1.1", "Host: elsewhere.example", "X-Own: 1",
            "Proxy-Authorization: Basic eA==", "Connection: keep-alive", "Content-Length: 3",
        )
    )  # fmt: skip
    assert (asked.host, asked.port) == ("api.example.com", 8080)
    assert asked.forward == head(
        "POST /v1?q=a@b HTTP/1.1", "Host: api.example.com:8080", "Connection: close", "X-Own: 1", "Content-Length: 3"
    )


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://a.example", "GET / HTTP/1.1\r\nHost: a.example\r\n"),
        ("http://a.example?x=1#top", "GET /?x=1 HTTP/1.1\r\nHost: a.example\r\n"),
        ("HTTP://[::1]/x", "GET /x HTTP/1.1\r\nHost: [::1]\r\n"),
        ("http://[::1]:81/x", "GET /x HTTP/1.1\r\nHost: [::1]:81\r\n"),
    ],
)
def test_paths_and_hosts_are_written_as_a_server_reads_them(url: str, line: str) -> None:
    assert parse_request(head(f"GET {url} HTTP/1.1")).forward.startswith(line.encode())


@pytest.mark.parametrize(
    "first",
    [
        "", "GET", "GET / HTTP/1.1", "GET https://a.example/ HTTP/1.1", "GET ftp://a.example/ HTTP/1.1",
        "GET http:///x HTTP/1.1", "GET http://user:pw@a.example/ HTTP/1.1", "GET http://a.example:0/ HTTP/1.1",
        "GET http://a.example:http/ HTTP/1.1", "GET http://a.example/ HTTP/2", "get http://a.example/ HTTP/1.1",
        "CONNECT a.example HTTP/1.1", "CONNECT a.example:0 HTTP/1.1", "CONNECT a.example:65536 HTTP/1.1",
        "CONNECT a.example:-1 HTTP/1.1", "CONNECT :443 HTTP/1.1", "CONNECT ::1:443 HTTP/1.1",
        "CONNECT [::1:443 HTTP/1.1", "CONNECT u@a.example:443 HTTP/1.1", "CONNECT a.example:443/x HTTP/1.1",
        "CONNECT http://a.example:443 HTTP/1.1", "CONNECT a\tb:443 HTTP/1.1", "CONNECT a.example:443  HTTP/1.1",
        "CONNECT fe80::1%lo:443 HTTP/1.1", "\x16\x03\x01\x02",
    ],
)  # fmt: skip
def test_what_a_proxy_does_not_take_is_refused(first: str) -> None:
    with pytest.raises(BadProxyRequest):
        parse_request(head(first, "Host: a.example"))


@pytest.mark.parametrize("line", ["no colon", " folded: x", "Host : a", "X: a\nY: b", "X: a\rY: b", "X: \0", ": empty"])
def test_headers_that_could_be_read_in_two_ways_are_refused(line: str) -> None:
    with pytest.raises(BadProxyRequest, match="header"):
        parse_request(head("GET http://a.example/ HTTP/1.1", line))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    for raw in (data, b"GET http://a.example/ HTTP/1.1\r\n" + data, b"CONNECT " + data + b" HTTP/1.1"):
        with contextlib.suppress(BadProxyRequest):
            asked = parse_request(raw + END)
            assert asked.host
            assert 1 <= asked.port <= 65_535


@pytest.mark.slow
@given(st.lists(st.tuples(TOKENS, VALUES), max_size=8))
def test_its_server_hears_one_host_and_every_header_of_the_clients_own(fields: list[tuple[str, str]]) -> None:
    asked = parse_request(head("GET http://a.example:81/x HTTP/1.1", *(f"{name}: {value}" for name, value in fields)))
    first, *lines = asked.forward.removesuffix(END).decode().split("\r\n")
    names = [line.partition(":")[0].lower() for line in lines]
    assert first == "GET /x HTTP/1.1"
    assert lines[:2] == ["Host: a.example:81", "Connection: close"]
    assert names.count("host") == names.count("connection") == 1
    ours = {"host", "connection", "keep-alive", "proxy-connection", "proxy-authorization"}
    assert lines[2:] == [f"{name}: {value}" for name, value in fields if name.lower() not in ours]
