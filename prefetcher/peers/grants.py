"""Checks of grants: what a holder knows of itself and of a reader decides whether it may read. `check_hello` is pure.

The key that grants are signed with is the controller's, which seals it for this daemon: it is read when a grant comes
that the known key does not prove, and seldom, so that a flood of forged ones asks Redis for little.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import NONCE_BYTES, grant_proof, grant_secret

from .frames import Hello, Refusal

READ_AGAIN_S = 1.0
"""Least time between two readings of the key."""


def check_hello(
    hello: Hello,
    *,
    holder: NodeId,
    epoch: str,
    key: bytes | None,
    holder_nonce: bytes,
    certified: str | None,
    now_unix_ms: int,
) -> Refusal | None:
    """Why the reader may not read; None if it may. `certified` is the node in its certificate, None without TLS."""
    grant = hello.grant
    if len(hello.nonce) != NONCE_BYTES:
        return "malformed"
    if (grant.holder, grant.epoch) != (holder, epoch):
        return "wrong_holder"
    if grant.expires_unix_ms <= now_unix_ms:
        return "expired"
    if certified is not None and certified != grant.reader:
        return "wrong_reader"
    if key is None:
        return "no_key"
    expected = grant_proof(grant_secret(grant, key), holder_nonce, hello.nonce)
    return None if hmac.compare_digest(expected, hello.proof) else "wrong_proof"


class PeerKeys:
    """The key that this node's grants are signed with. Used on the event loop."""

    def __init__(self, read: Callable[[], Awaitable[bytes | None]]) -> None:
        """`read` returns the key from Redis, None if there is none for this epoch or it cannot be read."""
        self._read = read
        self._key: bytes | None = None
        self._read_s = float("-inf")
        self._lock = asyncio.Lock()

    async def proves(self, check: Callable[[bytes | None], Refusal | None]) -> Refusal | None:
        """The result of a check with the known key, or with the one that took its place."""
        refusal = check(self._key)
        if refusal not in ("no_key", "wrong_proof"):
            return refusal
        async with self._lock:
            if time.monotonic() - self._read_s >= READ_AGAIN_S:
                self._key = await self._read() or self._key
                self._read_s = time.monotonic()
            return check(self._key)
