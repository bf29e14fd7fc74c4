"""The HTTP client with which the gateway reaches workers."""

from __future__ import annotations

import aiohttp

CONNECT_S = 2.0

_NO_AUTO = frozenset(("User-Agent", "Accept", "Accept-Encoding", "Content-Type"))


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600, use_dns_cache=False),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_NO_AUTO,
        max_line_size=65536,
        max_field_size=65536,
    )
