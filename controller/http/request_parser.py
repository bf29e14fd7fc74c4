"""Parser of HTTP requests: httptools', for which an Upgrade that the server does not take is as if it was not sent.

httptools takes what follows such a head for another protocol, and the body would be lost. Clients that would rather
speak HTTP/2 ask for it in that way in each of their first requests: Java's HttpClient, `curl --http2`.
"""

from __future__ import annotations

from collections.abc import Callable

import httptools


class RequestParser:
    """Parses the requests of one connection."""

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
