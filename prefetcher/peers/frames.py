"""Messages between a reader and a holder of chunks.

    holder: MAGIC and a nonce             once
    reader: Request, for HELLO its JSON   16 bytes: kind, chunk or length of the Hello, longest wait in ms, zero
    holder: Response, then its bytes      16 bytes: status, chunk, size; the bytes of a chunk, or a Refusal

Numbers are little-endian. Responses come in the order of the requests. The first request is a Hello; a later one, with
a grant for another checkpoint, keeps the connection warm from one fetch to the next. Each proves itself by the nonce of
its connection.

Chunks are read one by one where bytes pass through Python anyway: inside TLS, and at a measured pace. Otherwise the
reader sends STREAM after its Hello, and from then on both ends speak the native transport's frames (`peer_frames` of
the contract), until the reader leaves them for another Hello.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

import msgspec

from fleetstart.runtime.contract.node.peers import NONCE_BYTES, Grant

MAGIC = b"FSPEER1\n"
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
HELLO_MAX_BYTES = 4096
"""A grant has some 300 bytes."""
REQUEST = struct.Struct("<IIII")
RESPONSE = struct.Struct("<IIQ")
HELLO, READ, STREAM = 1, 2, 3
OK, NOT_READY, FAILED, EXPIRED, INVALID, REFUSED = range(6)
STATUS = {
    FAILED: "its own fetch of the checkpoint failed",
    EXPIRED: "the grant has expired",
    INVALID: "it has no such chunk",
}
"""In words."""

Refusal = Literal[
    "malformed", "wrong_holder", "expired", "wrong_reader", "no_key", "wrong_proof", "not_in_memory", "too_many"
]
"""Why a holder lets nobody read."""
REFUSALS: tuple[str, ...] = get_args(Refusal)
REFUSAL_MAX_BYTES = max(map(len, REFUSALS))


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reader's grant, its nonce, and the proof that it has the grant's secret."""

    grant: Grant
    nonce: bytes
    proof: bytes
