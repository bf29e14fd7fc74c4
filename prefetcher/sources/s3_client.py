"""S3 clients and pooled HTTP connections to a bucket.

botocore finds bucket and credentials, signs URLs and lists; the bytes of objects go over plain connections to the
signed URLs, kept open between requests, through the proxy and with the certificates that the configuration names.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from .http_settings import HttpSettings

READ_TIMEOUT_S = 10.0
"""Timeout without a single byte. The longest that a cancelled read can hold its memory."""
CONNECT_TIMEOUT_S = 3.0
MAX_IDLE = 32
URL_LIVES_S = 3600
STALE_ERRORS = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
"""Errors of a kept connection that the server has closed meanwhile."""


def open_client() -> Any:
    """A client without retries and without checksums of its own."""
    import botocore.session  # late: it takes a third of a second, and a node whose store is a folder needs none
    from botocore.config import Config

    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions())
    return session.create_client(
        "s3",
        config=Config(
            signature_version="s3v4",
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": 1},
            # Chunks are verified and objects of links signed by their readers and writers. S3's own checksums do not
            # cover ranges, and a signed URL must hold without one of the body.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


@cache
def _descriptions() -> Any:
    """What botocore knows of services, read once: a node opens several clients, and each would read and compile it, for
    a tenth of a second. Nothing else is shared among them, as credentials and connections of a session outlive its
    clients."""
    import botocore.loaders

    return botocore.loaders.create_loader()


class ConnectionPool:
    """Connections by host. Thread-safe. A connection that failed is closed by its user and not given back."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    def take(self, url: str) -> tuple[http.client.HTTPConnection, bool]:
        """A connection to the URL's host or its proxy, and whether it is new. It connects when it is first used."""
        target = urlsplit(url)
        with self._lock:
            idle = self._idle.get(f"{target.scheme}://{target.netloc}")
            if idle:
                return idle.pop(), False
        return self._open(url), True

    def give_back(self, url: str, connection: http.client.HTTPConnection) -> None:
        """Keeps a connection whose response was read to its end."""
        target = urlsplit(url)
        with self._lock:
            idle = self._idle.setdefault(f"{target.scheme}://{target.netloc}", [])
            if len(idle) < MAX_IDLE and not self._closed:
                idle.append(connection)
                return
        connection.close()

    def request_path(self, url: str) -> str:
        """The target of the request line: a proxy of plain HTTP wants the whole URL."""
        target = urlsplit(url)
        path = f"{target.path or '/'}?{target.query}" if target.query else target.path or "/"
        whole = target.scheme == "http" and self.proxy_for(url) is not None
        return f"http://{target.netloc}{path}" if whole else path

    def proxy_for(self, url: str) -> tuple[str, int | None] | None:
        """Host and port of the proxy for this URL; None if it is reached directly."""
        target, proxies = urlsplit(url), self._settings.proxies
        proxy = proxies.get(target.scheme)
        if not proxy or _is_direct(target.hostname or "", proxies.get("no", "")):
            return None
        found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return found.hostname or "", found.port

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._closed = self._idle, {}, True
        for connection in (connection for several in idle.values() for connection in several):
            connection.close()

    def _open(self, url: str) -> http.client.HTTPConnection:
        target = urlsplit(url)
        host, port = target.hostname or "", target.port
        proxy = self.proxy_for(url)
        if target.scheme != "https":
            if proxy:
                host, port = proxy
            return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._settings.ca_bundle)
        if not proxy:
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        connection = http.client.HTTPSConnection(*proxy, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        connection.set_tunnel(host, port)
        return connection


def _is_direct(host: str, no_proxy: str) -> bool:
    """True if `no_proxy` lists the host, a domain above it, or everything ("*")."""
    names = [name.strip().lstrip(".").lower() for name in no_proxy.split(",")]
    return "*" in names or any(name and (host == name or host.endswith(f".{name}")) for name in names)
