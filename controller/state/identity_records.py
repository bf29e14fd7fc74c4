"""Records of the certificate authority, of the nodes that it vouches for, and of their peer keys, in Redis."""

from __future__ import annotations

import msgspec

from .access_records import SecretRecord


class AuthorityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate authority: its certificate, and its key, which is encrypted as secrets are."""

    certificate: str
    """PEM."""
    key: SecretRecord


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has joined and was not removed. Certificates of earlier joins have another id in their name."""

    node: str
    id: str
    key_sha256: str
    """Digest of its public key: its certificate is renewed for this key alone."""
    joined_unix_ms: int
    expires_unix_ms: int
    """End of its newest certificate."""
    certificate: str = ""
    """The newest certificate, PEM: a renewal that is asked for again gets the same one."""


class PeerKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node's peer key, for controllers: with it they sign leave to read the node's memory."""

    node: str
    epoch: str
    key: SecretRecord
    """In hex, encrypted as secrets are."""
