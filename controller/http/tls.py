"""TLS of listening sockets: the context of a certificate and its key, with errors that name the file, its renewal when
the files change, and the header by which browsers stay with it."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from fleetstart.runtime.contract.process.environment import ConfigError

from .asgi import Message, Scope, Send

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Time between two looks at the files: a look costs two `stat` calls, and a certificate is renewed weeks ahead."""
HSTS = (b"strict-transport-security", b"max-age=15552000")
"""Half a year: long enough for those who come back now and then, and an end for a host that gives up TLS."""


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Context of a server, from PEM files: the certificate with its chain, and its key. Errors: ConfigError."""
    for what, path in (("certificate", certificate), ("key", key)):
        _require_readable(what, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    asked = False

    def no_passphrase() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if asked:
            reason = f"the key {key} is encrypted, and a server cannot ask for its passphrase"
        elif error.reason == "KEY_VALUES_MISMATCH":
            reason = f"the key {key} is not that of the certificate {certificate}"
        else:
            reason = f"{certificate} and {key} must be PEM files with a certificate and its key"
        raise ConfigError(f"TLS: {reason}") from error
    return context


def with_hsts(scope: Scope, send: Send, ports: frozenset[int]) -> Send:
    """`send` with Strict-Transport-Security, if the request came to one of these ports: those with TLS of our own.

    Only there: on loopback there is no TLS, and behind a proxy the header is the proxy's to send. Browsers ignore it
    for hosts that are addresses.
    """
    server = scope.get("server")
    if scope["type"] != "http" or not server or server[1] not in ports:
        return send

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), HSTS]
        await send(message)

    return sending


def _require_readable(what: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"TLS: the {what} {path} cannot be read: {error.strerror}") from error


class RenewedCertificate:
    """A server's certificate that follows its files: handshakes after a renewal show the new one, and connections that
    are open stay open. A background task."""

    def __init__(self, certificate: str, key: str, *, look_s: float = LOOK_S) -> None:
        """Errors: ConfigError."""
        self._paths = (certificate, key)
        self._look_s = look_s
        self._seen = _stamps(self._paths)
        self._newest = self.context = server_context(certificate, key)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called by each handshake, also where the client names no server."""
        if self._newest is not self.context:
            connection.context = self._newest

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self.look()

    def look(self) -> None:
        """Reads the files again if they have changed. A pair that does not fit is tried once; the old one stays."""
        stamps = _stamps(self._paths)
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._newest = server_context(*self._paths)
        except ConfigError as error:  # half written, say: the key comes after the certificate
            log.warning("the renewed certificate cannot be used, the old one stays", extra={"error": str(error)})
        else:
            log.info("the certificate was renewed", extra={"certificate": self._paths[0]})


def _stamps(paths: tuple[str, str]) -> list[tuple[int, int, int] | None]:
    """What changes when a file is written or replaced, also behind a link."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found
