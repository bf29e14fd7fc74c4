"""Sealed secrets: encrypted from the controller to one node, so that Redis in between cannot read them.

A node makes an X25519 key pair at each start of its daemon, keeps the private half in memory, and reports the public
one. The controller seals a worker's secrets for that node: a key pair of its own for this one box, HKDF-SHA256 over
what both halves agree on, AES-256-GCM over the JSON object name → value. Worker, node and epoch are authenticated with
it, so a box opens for the order that it was made for, and for no other.
"""

from __future__ import annotations

import msgspec

from ..ids import NodeId, WorkerId

INFO = b"fleetstart worker secrets 1"
NONCE_BYTES = 12


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    public: str = ""
    """The controller's half for this box, base64."""
    box: str = ""
    """Nonce and ciphertext, base64."""
    error: str = ""
    """The reason, if there is no box."""


def bound_to(worker: WorkerId, node: NodeId, epoch: str) -> bytes:
    """The additional data that is authenticated with the box."""
    return f"{worker}\0{node}\0{epoch}".encode()
