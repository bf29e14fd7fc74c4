"""Structs of the management API: nodes that join, are drained and removed."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetstart.runtime.contract.ids import CheckpointId, NodeId


class NodeJoin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node that is about to join."""

    node: str
    request: str
    """Request for a certificate, of a key that the node has made: PKCS #10 in PEM."""


class Renewal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node whose certificate is to be renewed."""

    node: str
    request: str
    """Request of the same key."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    certificate: str


class NodeCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate of a node that has joined."""

    node: str
    key_sha256: str
    """Digest of its public key."""
    joined_unix_ms: int
    expires_unix_ms: int


class JoinTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and settings with which a node joins: it holds the password of Redis."""

    redis_url: str
    store: str
    certificate: str
    """The node's certificate, and that of the authority: PEM."""
    authority: str
    redis_ca: str = ""
    """Certificates that Redis' own is checked by, PEM; empty: those that the machine trusts."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node as seen by the controller that answers."""

    node: str
    alive: bool
    draining: bool
    workers: int
    """Workers that are ordered to it and have not ended."""


class CopyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a checkpoint that a node is to keep in memory."""

    node: NodeId
    checkpoint: CheckpointId
    state: Literal["ready", "fetching"]
    ready_bytes: int
    size_bytes: int
    """0 until its node has begun."""
