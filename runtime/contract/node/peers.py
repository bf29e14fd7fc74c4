"""Reading chunks from peers: what orders and copies name, and how a reader proves that it may.

The controller grants a node leave to read one checkpoint's chunks in another node's memory, for a limited time. The
grant's secret is an HMAC of its fields by the holder's peer key, which the controller and the holder alone know: a
holder checks it without asking anybody. A reader never sends the secret: it answers the nonces of the connection with
it, so that who listens on a private network learns nothing that could be used again. Where nodes have certificates,
the connection is TLS besides, and the reader's certificate must be that of the node which the grant names.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from ..ids import CheckpointId, NodeId
from .sealed_secrets import Sealed

Transport = Literal["tcp", "rdma"]
NONCE_BYTES = 32
PEER_KEY_BYTES = 32
PEER_KEY_NAME = "peer_key"
"""Name under which the sealed box has the key, in hex."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Leave for one node to read a checkpoint's chunks in the memory of another."""

    checkpoint: CheckpointId
    holder: NodeId
    epoch: str
    """The holder's; a restarted daemon has another, and serves no earlier grant."""
    reader: NodeId
    expires_unix_ms: int
    """By the holder's clock; readings that were begun before end with the grant, too."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A node that holds chunks of a checkpoint, or will: as orders name it to the node that reads them."""

    node: NodeId
    address: str
    """host:port of its peer server."""
    host: str = ""
    """Name in its certificate; empty: the connection is plain, because both ends are on one machine or on a network
    that their operators declared private."""
    transports: tuple[Transport, ...] = ("tcp",)
    """What it offers, the best first."""
    grant: Grant
    secret: str
    """`grant_secret` of the grant, in hex."""
    ranges: tuple[tuple[int, int], ...] = ()
    """(begin, end) of the chunks that it has, or receives before its reader asks for them; asking for one that is still
    on its way waits for it."""


class Pull(msgspec.Struct, frozen=True):
    """A step of a multicast plan: the chunks that a node pulls next, and from which of its order's peers."""

    peer: int
    """Index among the peers; -1: from the object store."""
    first: int
    end: int
    """The chunk after the last."""


class SealedPeerKey(msgspec.Struct, frozen=True, kw_only=True):
    """A node's peer key, sealed for its epoch. The controller may replace it, so a node reads it again with its
    orders."""

    epoch: str
    sealed: Sealed


class CopyOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state: a node holds a checkpoint in host memory, whether a worker uses it or not."""

    node: NodeId
    epoch: str
    checkpoint: CheckpointId
    peers: tuple[Peer, ...] = ()
    pulls: tuple[Pull, ...] = ()
    ordered_unix_ns: int
    """Time of this order; a changed order has a later one."""
    decided_unix_ns: int = 0
    """Time of its first order."""


def peer_key_bound_to(node: NodeId, epoch: str) -> bytes:
    """The additional data that is authenticated with the box of a node's peer key."""
    return f"{PEER_KEY_NAME}\0{node}\0{epoch}".encode()


def grant_secret(grant: Grant, peer_key: bytes) -> str:
    """The secret by which the grant's reader proves that it has it, in hex. `peer_key`: the holder's."""
    return hmac.new(peer_key, msgspec.json.encode(grant), hashlib.sha256).hexdigest()


def grant_proof(secret: str, holder_nonce: bytes, reader_nonce: bytes) -> bytes:
    """The reader's answer to the holder's nonce, of 32 bytes. Compare it with `hmac.compare_digest`. Errors: ValueError
    unless the secret is hex."""
    return hmac.new(bytes.fromhex(secret), b"fleetstart-peer:" + holder_nonce + reader_nonce, hashlib.sha256).digest()
