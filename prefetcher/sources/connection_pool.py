"""HTTP connections to one object store, kept open between ranges; proxies and certificates as the environment says."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 3.0
MAX_IDLE = 32


class ConnectionPool:
    """Thread-safe. One that failed is closed by who has it and not given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._tls: ssl.SSLContext | None = None

    def take(self, url: str) -> tuple[http.client.HTTPConnection, bool]:
        """To the URL's host, or to the proxy before it, and whether it is new. OSError when it is used, not here."""
        target = urlsplit(url)
        with self._lock:
            idle = self._idle.get(f"{target.scheme}://{target.netloc}")
            if idle:
                return idle.pop(), False
        return self._open(url), True

    def give_back(self, url: str, connection: http.client.HTTPConnection) -> None:
        """After an answer that was read to its end."""
        target = urlsplit(url)
        with self._lock:
            idle = self._idle.setdefault(f"{target.scheme}://{target.netloc}", [])
            if len(idle) < MAX_IDLE:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in (connection for several in idle.values() for connection in several):
            connection.close()

    def _open(self, url: str) -> http.client.HTTPConnection:
        target = urlsplit(url)
        host, port = target.hostname or "", target.port
        proxy = proxy_for(url)
        if target.scheme != "https":
            if proxy:
                host, port = proxy
            return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=ca_bundle(os.environ))
        if not proxy:
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        connection = http.client.HTTPSConnection(*proxy, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        connection.set_tunnel(host, port)
        return connection


def proxy_for(url: str) -> tuple[str, int | None] | None:
    """As http_proxy, https_proxy and no_proxy say."""
    target = urlsplit(url)
    if urllib.request.proxy_bypass(target.hostname or ""):
        return None
    proxy = urllib.request.getproxies().get(target.scheme)
    if not proxy:
        return None
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return found.hostname or "", found.port


def request_path(url: str) -> str:
    """What stands in the request line: a proxy of plain HTTP wants the whole URL."""
    target = urlsplit(url)
    path = f"{target.path or '/'}?{target.query}" if target.query else target.path or "/"
    whole = target.scheme == "http" and proxy_for(url) is not None
    return f"http://{target.netloc}{path}" if whole else path


def ca_bundle(env: Mapping[str, str]) -> str | None:
    """The certificates to trust, where somebody named them; None for the system's."""
    return env.get("AWS_CA_BUNDLE") or env.get("REQUESTS_CA_BUNDLE") or None
