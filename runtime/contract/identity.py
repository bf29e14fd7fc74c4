"""Identities on TLS links: a certificate with its key, the authority behind other certificates, and contexts.

Whoever listens and whoever connects both show a certificate, in TLS 1.3. The contexts check that the authority signed
the other one's; which names and roles a link is for, its own code checks (`role_of`, or the host name that a client
expects). Keys are made and certificates signed elsewhere: here nothing but the standard library is needed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

CONTROLLER = "controller"
NODE = "node"
FILE = "identity.json"
"""A node's identity in its own folder of FS_HOME, readable by its owner alone."""
_ROLE = "fleetstart:"
_DOMAIN = "node.fleetstart.internal"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate, key and authority of one end of a link, as PEM. It holds a private key: never log it."""

    certificate: str
    key: str
    authority: str
    """Certificate that signs those of the other ends."""

    def __repr__(self) -> str:
        return "Identity(...)"


def read_identity(path: Path) -> Identity | None:
    """The identity in a file; None if there is none, or one that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except (OSError, msgspec.DecodeError):
        return None


def write_identity(path: Path, identity: Identity) -> None:
    """Replaces the file at once. Errors: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(identity))
    fresh.replace(path)


def node_host(node: str, identity: str) -> str:
    """Host name in a node's certificate, which clients expect. `identity` is new at each join: a certificate of an
    earlier one does not fit."""
    return f"{hashlib.sha256(f'{node}/{identity}'.encode()).hexdigest()[:40]}.{_DOMAIN}"


def role_uri(role: str, name: str) -> str:
    """URI in a certificate, by which servers know what connects to them."""
    return f"{_ROLE}{role}:{name}"


def role_of(certificate: dict[str, Any] | None) -> str:
    """Role in a certificate as `SSLSocket.getpeercert` shows it; empty if it has none."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(_ROLE):
            return str(value[len(_ROLE) :].partition(":")[0])
    return ""


def node_of(certificate: dict[str, Any] | None) -> str:
    """Name of the node whose certificate it is, as `SSLSocket.getpeercert` shows it; empty if it is no node's."""
    prefix = role_uri(NODE, "")
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(prefix):
            return str(value[len(prefix) :])
    return ""


def server_context(identity: Identity) -> ssl.SSLContext:
    """Context of a listener that talks to holders of a certificate only. Errors: ssl.SSLError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0  # links last for minutes: resuming one would only put off checking its certificate
    return context


def client_context(identity: Identity, *, check_hostname: bool = True) -> ssl.SSLContext:
    """Context of a connection to such a listener. Errors: ssl.SSLError."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    context.check_hostname = check_hostname
    return context


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority)
    with _as_file(identity.key + identity.certificate) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path for the moment: `ssl` reads keys from files only."""
    try:
        descriptor = os.memfd_create("identity", os.MFD_CLOEXEC)
    except OSError:  # a sandbox that has none
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(text)
            file.flush()
            yield file.name
        return
    with open(descriptor, "w") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


def is_loopback(host: str) -> bool:
    """Checks whether packets to this host stay on this machine, as its address says."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def stays_here(link: socket.socket) -> bool:
    """Checks whether both ends of a connection are on this machine: an address talks to itself, over loopback."""
    if link.family == socket.AF_UNIX:
        return True
    here, there = link.getsockname()[0], link.getpeername()[0]
    return here == there or is_loopback(there)
