"""uvicorn's HTTP protocol with limits on what a client may send before its request, and so its key, is known.

A request's head (request line and headers) is limited in bytes, headers and time, and connections in number. When all
places are taken, the connection that has waited longest between requests gives way: calls under way keep theirs.

Trailers are counted as a head's bytes and dropped: taken for headers, as uvicorn does, they would come after a key was
checked. A head that a server or proxy in front may read in another way is refused. An upgrade to anything but a
WebSocket is ignored, and a client of HTTP/1.0 gets no chunks.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from fleetstart.runtime.contract.errors import FleetError, Refused

from .asgi import Message, Receive, Scope, Send, error_headers, error_json

HEAD_MAX_BYTES = 64 * 1024
HEADERS_MAX = 256
PIPELINED_MAX = 32
"""Requests that may wait behind the one that is answered: one read may bring ten thousand, of 600 bytes each here."""
HEAD_S = 15.0
"""From a head's first byte to its end."""
LINGER_S = 2.0
LINGER_BYTES = 1024 * 1024
"""A client that is refused may still be sending: closing at once would reset the connection before it has read why."""
HTTP_HINT = "RFC 9112 says what a request looks like"
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
"""What a Host may consist of (RFC 3986, authority without user)."""
DESCRIPTORS_RESERVED = 256
"""For Redis, the object store, log files and what else the process has open."""


class HeadersTooLarge(Refused):
    code = "headers_too_large"
    status = 431


class HeadTimeout(Refused):
    code = "request_timeout"
    status = 408


def connections_max(descriptors: int) -> int:
    """Number of client connections for that many descriptors: each call under way needs a second, to its worker."""
    return max(16, (descriptors - DESCRIPTORS_RESERVED) // 2)


def head_fault(version: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """What is wrong with a head that the parser has read, by RFC 9112; empty if nothing is. Names are lower case."""
    hosts = [value for name, value in headers if name == b"host"]
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if version not in ("1.0", "1.1"):
        return f"its version is HTTP/{version}, and this server speaks 1.1"
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return f"it has {len(hosts) or 'no'} Host headers, and needs one"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return "its Host is none"
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return "its Transfer-Encoding is not `chunked` in HTTP/1.1"
    return ""


class ConnectionTable:
    """A server's open connections: how many there may be, and which of them wait for a request, the oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting: dict[LimitedHttpProtocol, None] = {}

    def make_room(self, connections: int) -> bool:
        """Closes the connection that has waited longest if no place is left. Returns whether there is one now."""
        if connections < self.limit:
            return True
        longest = next(iter(self.waiting), None)
        if longest is None:
            return False
        del self.waiting[longest]
        longest.transport.abort()
        return True


class RequestParser:
    """httptools' parser of requests, for which an Upgrade that the server does not take is as if it was not sent.

    httptools takes what follows such a head for another protocol, and the body would be lost. Clients that would rather
    speak HTTP/2 ask for it in that way in each of their first requests: Java's HttpClient, `curl --http2`.
    """

    def __init__(self, protocol: object, head: Callable[[], bytes | None]) -> None:
        """`head` is called after a head with an Upgrade: it returns the head without it, to be parsed again, or None
        if the upgrade is taken."""
        self._protocol = protocol
        self._head = head
        self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it, for pipelined requests
        return parser

    def feed_data(self, data: bytes) -> None:
        """Errors: HttpParserUpgrade if an upgrade is taken; HttpParserError for what is no request, and CONNECT."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = self._head()
                if head is None:
                    raise
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT is for proxies") from None
                data = data[upgrade.args[0] :]
            self._parser = self._new_parser()
            self._parser.feed_data(head)

    def should_upgrade(self) -> bool:
        return bool(self._parser.should_upgrade())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Its head is counted as it arrives: the parser itself has no limits."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], table: ConnectionTable
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.parser: Any = RequestParser(self, self._head_without_upgrade)
        self._table = table
        self._running: RequestResponseCycle | None = None
        """The request that is answered; others may wait behind it."""
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._discarded_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        room = self._table.make_room(len(self.connections))
        super().connection_made(transport)
        if not room:
            transport.abort()
            return
        self._table.waiting[self] = None
        # A browser may open a connection before it has a request for it: no bytes are answered with no bytes.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.waiting.pop(self, None)
        self._stop_timer()
        self._end_running()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self.transport.close()
            return
        was_in_head = self._in_head
        super().data_received(data)
        if not self._in_head or self._refused or self.transport.is_closing():
            return
        if was_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_MAX_BYTES:
                self._refuse(HeadersTooLarge(f"the request's headers have more than {HEAD_MAX_BYTES} bytes"))
                return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_MAX_BYTES and not self._refused:
            self._refuse(HeadersTooLarge(f"the request's trailers have more than {HEAD_MAX_BYTES} bytes"))

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused and not self._ignores_upgrade():
            super().on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        if self._ignores_upgrade():
            return  # the parser begins this request again without it
        if len(self.pipeline) >= PIPELINED_MAX:
            self._refused = True
        if self._refused:
            return  # the connection ends after the requests before it
        self._in_head = False
        self._table.waiting.pop(self, None)
        self._stop_timer()
        if len(self.headers) > HEADERS_MAX:
            self._refuse(HeadersTooLarge(f"the request has {len(self.headers)} headers; {HEADERS_MAX} are allowed"))
            return
        if fault := head_fault(self.parser.get_http_version(), self.headers):
            self._refuse(Refused(f"the request is no valid HTTP: {fault}", hint=HTTP_HINT))
            return
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or (self._running is not None and not self._running.response_complete):
            return
        if self._refused:
            self.transport.close()
            return
        self._table.waiting[self] = None
        if self._in_head:  # the next request began while this one was answered
            self._start_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] != "1.0" else _unchunked(app, cycle))

    def _end_running(self) -> None:
        """Lets the request that is answered know that its client is gone: uvicorn tells the last one that came."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    # ── upgrades ───────────────────────────────────────────────────────────────────────────────────

    def _should_upgrade(self) -> bool:
        is_handshake = self.parser.get_method() == b"GET" and self.parser.get_http_version() == "1.1"
        return is_handshake and super()._should_upgrade()

    def _ignores_upgrade(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _head_without_upgrade(self) -> bytes | None:
        if self._should_upgrade():
            return None
        begin = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([begin, *kept, b"", b""])

    # ── the head's time ────────────────────────────────────────────────────────────────────────────

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._refused and not self.transport.is_closing():
            self._refuse(HeadTimeout(f"the request's headers did not arrive within {HEAD_S:g} s"))

    # ── refusals ───────────────────────────────────────────────────────────────────────────────────

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser cannot read, with its reason; uvicorn calls this while it handles the error."""
        if not self._refused:
            self._refuse(Refused(f"the request is no valid HTTP: {sys.exception() or msg}", hint=HTTP_HINT))

    def _refuse(self, error: FleetError) -> None:
        """Answers with the error, and closes. Requests that came before are answered first, and then it is not sent."""
        self._refused = True
        self._stop_timer()
        if self._running is not None and not self._running.response_complete:
            if self._in_head or not self.cycle.more_body:
                return  # the connection ends after the requests before it
            answered = self._running is not self.cycle or self.cycle.response_started
            self._end_running()
            if answered:
                self.transport.abort()
                return
        body = error_json(error, "")
        headers = [*error_headers(error, ""), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = [b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode())]
        head += [b"%b: %b" % pair for pair in headers]
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self._table.waiting.setdefault(self)
        self.loop.call_later(LINGER_S, self.transport.close)


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """The app for a client of HTTP/1.0: an answer without a length ends with its connection, not in chunks."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        unsized = False

        async def sending(message: Message) -> None:
            nonlocal unsized
            if message["type"] == "http.response.start":
                unsized = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if unsized else None
            elif unsized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return answering
