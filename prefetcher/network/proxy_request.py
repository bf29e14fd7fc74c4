"""Parser of requests to an HTTP proxy: `CONNECT host:port`, or a request for `http://host/...` itself. Pure.

The request comes from user code and is untrusted: everything about it is checked, and what is forwarded to the
server is composed anew from the parts.

Not h11: tried on the same tests, 32 of 74 failed. It rejects a CONNECT without Host, which clients send, and accepts
folded headers and bare line feeds, which a server behind the proxy may read in another way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleetstart.runtime.contract.function.egress_policy import plain_host, read_port

END = b"\r\n\r\n"
HEAD_MAX_BYTES = 32 * 1024
"""Limit of a request's head: enough for a URL of 8 KiB and generous cookies."""
_LINE = re.compile(rb"([A-Z]{1,32}) ([!-~]{1,16384}) HTTP/1\.[01]")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)")
_URL = re.compile(r"http://([^/?#@\s]+)(/[^#\s]*|\?[^#\s]*)?(#\S*)?", re.IGNORECASE)
_HTTP_PORT = 80
_OURS = {b"host", b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization"}


class BadProxyRequest(Exception):
    """The request is malformed or not for a proxy; `status` is the HTTP status to reject it with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRequest:
    """A parsed request: the server to connect to and what to send it."""

    host: str
    """Normalized by `plain_host`."""
    port: int
    forward: bytes = b""
    """Head to send to the server; empty for a tunnel, whose bytes are copied as they are."""


def parse_request(head: bytes) -> ProxyRequest:
    """Parses `head`, which ends with an empty line. Errors: BadProxyRequest."""
    first, *lines = head.removesuffix(END).split(b"\r\n")
    match = _LINE.fullmatch(first)
    if match is None:
        raise BadProxyRequest("this is an HTTP/1.1 proxy, and that is no request of HTTP/1.1")
    method, target = match[1], match[2]
    fields = [_FIELD.fullmatch(line) for line in lines]
    if None in fields:
        raise BadProxyRequest("a header of the request cannot be read")
    if method == b"CONNECT":
        host, port = _authority(target.decode(), None)
        return ProxyRequest(host=host, port=port)
    url = _URL.fullmatch(target.decode())
    if url is None:
        raise BadProxyRequest(_no_url(target.decode()))
    host, port = _authority(url[1], _HTTP_PORT)
    path = url[2] or "/"
    kept = [field[0] for field in fields if field is not None and field[1].lower() not in _OURS]
    where = f"[{host}]" if ":" in host else host
    own = [
        b"%s %s HTTP/1.1" % (method, (path if path.startswith("/") else f"/{path}").encode()),
        b"Host: " + (where if port == _HTTP_PORT else f"{where}:{port}").encode(),
        # One request a connection: the next one may be for another host, and would have to be judged.
        b"Connection: close",
    ]
    return ProxyRequest(host=host, port=port, forward=b"\r\n".join([*own, *kept]) + END)


def _no_url(target: str) -> str:
    if target.startswith("/"):
        return "this is a proxy, which is asked for whole URLs: http://host/path, or CONNECT host:port"
    if target.lower().startswith("https:"):
        return "for https the proxy is asked with CONNECT host:443"
    return "the proxy takes CONNECT host:port and http:// URLs"


def _authority(text: str, default: int | None) -> tuple[str, int]:
    name, colon, digits = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, port = text, default
    else:
        port = read_port(digits)
    if port is None:
        raise BadProxyRequest("the port to connect to must be 1 to 65535, as in CONNECT host:443")
    host = plain_host(name)
    if host is None or (":" in name and not name.startswith("[")):
        raise BadProxyRequest("the host to connect to is neither a name nor an address")
    return host, port
