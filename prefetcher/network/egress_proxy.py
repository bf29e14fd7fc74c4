"""The egress proxy: an HTTP proxy for each worker whose function has a list of allowed destinations.

A worker's network namespace has a loopback interface alone. The worker listens there and passes its listening socket to
the node (`runtime`'s egress socket), which accepts here. Each request is checked against the function's list
(`contract.function.egress_policy`) and what the node denies to all (`egress_denials`), and the proxy connects to an
address that was checked, not to a name that could resolve to something else a moment later.

All of it runs in the I/O thread. A proxy ends with its worker, connections included; a daemon that is killed leaves
nothing behind, as sockets are all there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleetstart.runtime.contract.function.egress_policy import Rule, decide, must_look_up, parse_rules
from fleetstart.runtime.contract.function.public_addresses import literal

from ..concurrency.threads import IoThread
from .acceptor import Acceptor
from .dialer import ConnectFailed, connect, resolve
from .platform_addresses import PlatformAddresses
from .proxy_request import END, HEAD_MAX_BYTES, BadProxyRequest, ProxyRequest, parse_request
from .tunnel import carry

log = logging.getLogger(__name__)

LOGGED_REJECTIONS_MOST = 100
"""Different rejections written to a function's log."""
LIST_CHARS = 1000
"""Characters of the function's list shown in a rejection."""
LOOKUPS = 4
"""Concurrent name lookups of one worker: each takes a thread for as long as the name servers do."""
LINGER_S = 1.0
LINGER_BYTES = 1 << 20
"""Bytes of a rejected request that are read before the socket is closed: closing it earlier would discard the
response."""
_REASONS = {
    400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip

LogLine = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressLimits:
    """Limits of the egress proxies of one node."""

    connections: int = 128
    """Concurrent connections of one worker."""
    connections_of_node: int = 1024
    head_s: float = 10.0
    """Timeout for a request's head."""
    connect_s: float = 10.0
    """Timeout from the head until the server has accepted the connection, name lookup included."""
    idle_s: float = 300.0
    """Timeout without a byte in either direction."""


def egress_limits(descriptors: int) -> EgressLimits:
    """Limits for a process with so many descriptors: a fourth of them, two a connection, so that other work goes on."""
    of_node = min(EgressLimits().connections_of_node, max(1, descriptors // 8))
    return EgressLimits(connections=min(EgressLimits().connections, of_node), connections_of_node=of_node)


class ProxyRejection(Exception):
    """A request that the proxy rejects, with its status and message."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(slots=True)
class EgressTraffic:
    """Totals of a node since its daemon started, or of one worker; written by the I/O thread alone."""

    sent_bytes: int = 0
    received_bytes: int = 0
    rejected: int = 0
    open: int = 0
    """Connections open now."""

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes


class NodeEgress:
    """The egress proxies of one node. Its methods are called from the daemon's loop."""

    def __init__(self, limits: EgressLimits, io_thread: IoThread, platform: PlatformAddresses) -> None:
        """`platform`: what no function may reach, whatever its list says."""
        self._platform = platform
        self.traffic = EgressTraffic()
        self._limits = limits
        self._io_thread = io_thread

    def open(
        self, listener: socket.socket, entries: Sequence[str], log_line: LogLine, own: EgressTraffic
    ) -> Callable[[], None]:
        """Starts a proxy on the listener, which it owns. `log_line` writes to the function's log, `own` counts what is
        this worker's. Returns a function that closes it."""
        loop = asyncio.get_running_loop()

        def log_in_daemon(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the daemon's loop has ended
                loop.call_soon_threadsafe(log_line, text)

        proxy = EgressProxy(listener, entries, log_in_daemon, self._limits, (self.traffic, own), self._platform)
        self._io_thread.call(proxy.start)
        return lambda: self._io_thread.call(proxy.stop)


class EgressProxy:
    """The egress proxy of one worker. Runs in the I/O thread."""

    def __init__(
        self,
        listener: socket.socket,
        entries: Sequence[str],
        log_line: LogLine,
        limits: EgressLimits,
        traffic: tuple[EgressTraffic, EgressTraffic],
        platform: PlatformAddresses,
    ) -> None:
        """`traffic`: of the node, and of the worker alone."""
        self._platform = platform
        self._acceptor = Acceptor(listener, self._on_connection)
        self._open = 0
        """Connections of this worker, including those being rejected."""
        self._rules: tuple[Rule, ...] = parse_rules(entries)
        self._list = _truncate(", ".join(entries))
        self._log_line = log_line
        self._logged: set[str] = set()
        self._limits = limits
        self._traffic, self._own = traffic
        self._lookups = asyncio.Semaphore(LOOKUPS)

    def start(self) -> None:
        self._acceptor.start()

    def stop(self) -> None:
        self._acceptor.stop()

    def _on_connection(self, client: socket.socket) -> None:
        if self._open >= 2 * self._limits.connections:
            client.close()  # too many even to send a rejection
            return
        self._open += 1
        self._acceptor.spawn(self._serve(client, self._over_limit()), client.close, self._release)

    def _release(self) -> None:
        self._open -= 1

    def _over_limit(self) -> str:
        """The reason why one more connection is too many; empty if it is not."""
        most, most_of_node = self._limits.connections, self._limits.connections_of_node
        if self._open > most:
            return f"this worker has {most} connections open, and may have no more"
        if self._traffic.open >= most_of_node:
            return f"this node has {most_of_node} connections open for its workers, and takes no more"
        return ""

    async def _serve(self, client: socket.socket, over_limit: str) -> None:
        self._traffic.open += 1
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._proxy(client, over_limit)
        except (OSError, EOFError):
            return  # the client left, or the connection was idle for too long
        except Exception:
            log.exception("unexpected error in an egress proxy")
        finally:
            self._traffic.open -= 1

    async def _proxy(self, client: socket.socket, over_limit: str) -> None:
        try:
            if over_limit:
                raise ProxyRejection(503, over_limit)
            request, rest = await self._read_request(client)
            server = await self._connect(request)
        except ProxyRejection as rejection:
            await _send_rejection(client, rejection)
            return
        loop = asyncio.get_running_loop()
        with server:
            first = request.forward + rest
            self._count(len(first), 0)
            async with asyncio.timeout(self._limits.idle_s):
                if not request.forward:
                    await loop.sock_sendall(client, b"HTTP/1.1 200 Connection established\r\n\r\n")
                await loop.sock_sendall(server, first)
            await carry(client, server, idle_s=self._limits.idle_s, count=self._count)

    def _count(self, sent_bytes: int, received_bytes: int) -> None:
        for traffic in (self._traffic, self._own):
            traffic.count(sent_bytes, received_bytes)

    async def _read_request(self, client: socket.socket) -> tuple[ProxyRequest, bytes]:
        """The request, and the bytes received after its head. Errors: ProxyRejection, EOFError if the client left."""
        try:
            async with asyncio.timeout(self._limits.head_s):
                head, rest = await _read_head(client)
            return parse_request(head), rest
        except TimeoutError as error:
            raise ProxyRejection(408, f"the request's head did not come within {self._limits.head_s:g} s") from error
        except BadProxyRequest as error:
            raise ProxyRejection(error.status, str(error)) from error

    async def _connect(self, request: ProxyRequest) -> socket.socket:
        """A connection to the requested server. Errors: ProxyRejection if it is not allowed or does not answer."""
        host, port = request.host, request.port
        own = literal(host)
        try:
            async with asyncio.timeout(self._limits.connect_s):
                addresses = (own,) if own is not None else ()
                if must_look_up(host, port, self._rules):
                    # Shielded: until the name servers have answered, the lookup's thread is occupied.
                    addresses = await asyncio.shield(self._resolve(host, port))
                decision = decide(host, port, addresses, self._rules, await self._platform.denials())
                if not decision.addresses:
                    raise ProxyRejection(403, self._reject(decision.why))
                return await connect(decision.addresses, port, self._limits.connect_s)
        except TimeoutError as error:
            raise ProxyRejection(504, f"no connection to {host}:{port} within {self._limits.connect_s:g} s") from error
        except ConnectFailed as error:
            raise ProxyRejection(502, str(error)) from error

    def _resolve(self, host: str, port: int) -> asyncio.Task[Any]:
        async def one() -> Any:
            async with self._lookups:
                return await resolve(host, port)

        return asyncio.get_running_loop().create_task(one())

    def _reject(self, why: str) -> str:
        """The rejection's message, which is logged once."""
        text = f"{why}; this function may reach: {self._list}"
        self._traffic.rejected += 1
        if text not in self._logged and len(self._logged) <= LOGGED_REJECTIONS_MOST:
            self._logged.add(text)
            enough = len(self._logged) > LOGGED_REJECTIONS_MOST
            self._log_line(f"network: {f'{LOGGED_REJECTIONS_MOST} rejections: no more are logged' if enough else text}")
        return text


async def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """Bytes up to the empty line, and the bytes after it. Errors: BadProxyRequest if there are too many, EOFError."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while (end := data.find(END)) < 0:
        if len(data) > HEAD_MAX_BYTES:
            raise BadProxyRequest(f"the request's head has more than {HEAD_MAX_BYTES} bytes", 431)
        more = await loop.sock_recv(client, HEAD_MAX_BYTES + len(END) - len(data) + 1)
        if not more:
            raise EOFError
        data += more
    end += len(END)
    return bytes(data[:end]), bytes(data[end:])


async def _send_rejection(client: socket.socket, rejection: ProxyRejection) -> None:
    """Sends the reason, in the status line too: clients show little else of a response to CONNECT."""
    loop = asyncio.get_running_loop()
    body = f"{rejection.text}\n".encode()
    reason = f"{_REASONS[rejection.status]}: {rejection.text}".encode("ascii", "replace")[:400]
    head = b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\n" % (rejection.status, reason)
    head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(client, head + body)
            client.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            while left > 0 and (got := len(await loop.sock_recv(client, 64 * 1024))):
                left -= got


def _truncate(text: str) -> str:
    return text if len(text) <= LIST_CHARS else f"{text[:LIST_CHARS]} …"
