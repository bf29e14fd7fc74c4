"""The node's certificate: read from its folder, renewed by itself, void once the node was removed.

`fs node join` has made the key, which never leaves this machine and is never given to a worker. When a renewal is due
is decided by the certificate alone; contexts that are handed out follow it, and open connections stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fleetstart.runtime.contract.identity import (
    Identity,
    client_context,
    read_identity,
    server_context,
    write_identity,
)

from ..concurrency.threads import in_thread

log = logging.getLogger(__name__)

RETRY_S, RETRY_MOST_S = 5.0, 600.0
"""Pauses after a failed renewal, which grow: twelve hours are left for it."""
LOOK_MOST_S = 3600.0
"""Longest pause between two looks at the clock, which may step."""
REQUEST_S = 5.0
APPEARS_S = 20.0
"""Wait for the file: the controller of the same FS_HOME writes that of its own node while it starts."""
POLL_S = 0.05
REMOVED = 403


class NodeRemoved(Exception):
    """The system vouches for this node no longer; the message says what to do."""


class RenewalFailed(Exception):
    """No controller has renewed the certificate; a later attempt may succeed."""


def renewal_due_s(certificate: str, now_unix_s: float) -> float:
    """Seconds until a certificate is to be renewed, which is at half of its life; 0: now."""
    read = x509.load_pem_x509_certificate(certificate.encode())
    begin_s, end_s = read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp()
    return max(0.0, (begin_s + end_s) / 2 - now_unix_s)


class NodeCertificate:
    """The node's identity and the contexts of its links. Used on the daemon's loop, but for the contexts."""

    def __init__(self, node: str, path: Path, identity: Identity, servers: Sequence[str]) -> None:
        """`servers`: URLs of controllers. Errors: ssl.SSLError, ValueError if the identity is broken."""
        self._node = node
        self._path = path
        self._servers = servers
        self.identity = identity
        self._context = server_context(identity)
        self._client_context = client_context(identity)

    @property
    def host(self) -> str:
        """Host name in the certificate, which clients of the node expect; empty if it has none."""
        names = x509.load_pem_x509_certificate(self.identity.certificate.encode()).extensions
        try:
            hosts = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
        except x509.ExtensionNotFound:
            return ""
        return str(hosts[0]) if hosts else ""

    def context(self) -> ssl.SSLContext:
        """The context of the newest certificate, for each new connection. Thread-safe."""
        return self._context

    def client_context(self) -> ssl.SSLContext:
        """Likewise, of a connection to another node. Thread-safe."""
        return self._client_context

    async def run(self) -> None:
        """Renews the certificate whenever that is due. Errors: NodeRemoved."""
        pause_s = RETRY_S
        while True:
            due_s = renewal_due_s(self.identity.certificate, time.time())
            if due_s > 0:
                await asyncio.sleep(min(due_s, LOOK_MOST_S))
                continue
            try:
                await self.renew()
                pause_s = RETRY_S
            except RenewalFailed as error:
                log.warning("the node's certificate could not be renewed", extra={"error": str(error)})
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
            else:  # a clock that is far ahead would ask without end
                await asyncio.sleep(RETRY_S)

    async def renew(self) -> None:
        """Gets a new certificate for the node's key. Errors: RenewalFailed, NodeRemoved."""
        request = {"node": self._node, "request": _request(self.identity.key)}
        reason = "no controller is known: FS_URL is not set"
        for server in self._servers:
            try:
                certificate = await in_thread(lambda server=server: _ask(server, request), "renewal")  # type: ignore[misc]
            except (httpx.HTTPError, ValueError, KeyError) as error:
                reason = f"{server}: {error}"
                continue
            self._replace(certificate)
            return
        raise RenewalFailed(reason)

    def _replace(self, certificate: str) -> None:
        identity = Identity(certificate=certificate, key=self.identity.key, authority=self.identity.authority)
        try:
            self._context, self._client_context = server_context(identity), client_context(identity)
        except ssl.SSLError as error:
            raise RenewalFailed(f"the new certificate cannot be used: {error}") from error
        self.identity = identity
        try:
            write_identity(self._path, identity)
        except OSError as error:  # it is in memory, and the file is good for a restart within its time
            log.warning("the renewed certificate could not be written", extra={"error": str(error)})
        log.info("the node's certificate was renewed")


async def open_certificate(
    node: str, path: Path, servers: Sequence[str], *, needed: bool, stopped: Callable[[], bool]
) -> NodeCertificate | None:
    """The node's certificate, as new as a controller makes it; None if it has none. `needed`: wait for its file, which
    may be on its way. Errors: NodeRemoved."""
    ends_s = time.monotonic() + APPEARS_S
    while (identity := read_identity(path)) is None:
        if not needed or stopped() or time.monotonic() > ends_s:
            return None
        await asyncio.sleep(POLL_S)
    try:
        certificate = NodeCertificate(node, path, identity, servers)
    except (ssl.SSLError, ValueError) as error:
        log.warning("the node's certificate cannot be used", extra={"file": str(path), "error": str(error)})
        return None
    try:
        async with asyncio.timeout(2 * REQUEST_S):
            await certificate.renew()
    except (RenewalFailed, TimeoutError) as error:  # the one that it has may be good
        log.info("the node's certificate was not renewed at its start", extra={"error": str(error)})
    return certificate


def _ask(server: str, request: dict[str, str]) -> str:
    """Errors: NodeRemoved; httpx.HTTPError, ValueError, KeyError."""
    answer = httpx.post(f"{server.rstrip('/')}/api/v1/certificates", json=request, timeout=REQUEST_S)
    if answer.status_code == REMOVED:
        error = answer.json()["error"]
        raise NodeRemoved(f"{error['message']}; {error.get('hint', '')}")
    answer.raise_for_status()
    return str(json.loads(answer.content)["certificate"])


def _request(key: str) -> str:
    loaded = load_pem_private_key(key.encode(), None)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(loaded, SHA256()).public_bytes(Encoding.PEM).decode()  # type: ignore[arg-type]
