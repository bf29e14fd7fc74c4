"""The handshake between a reader and a holder of chunks.

    holder: MAGIC and a nonce                                    once
    reader: the length of a Hello, its JSON
    holder: 0, or the length of a Refusal and the Refusal        who is refused is cut off

Lengths are four bytes, little-endian. Then the connection speaks what the Hello names: the frames of `peer_frames` in
the contract, the same bytes whether native code or Python moves them, until the reader leaves them for another Hello,
with a grant for another checkpoint; or the side channel of RDMA, until its end. Each Hello proves itself by the nonce
of its connection, so that a connection stays warm from one fetch to the next.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

import msgspec

from fleetstart.runtime.contract.node.peers import NONCE_BYTES, Grant, Transport

MAGIC = b"FSPEER1\n"
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
HELLO_MAX_BYTES = 4096
"""A grant has some 300 bytes."""
LENGTH = struct.Struct("<I")

Refusal = Literal[
    "malformed",
    "wrong_holder",
    "expired",
    "wrong_reader",
    "no_key",
    "wrong_proof",
    "not_in_memory",
    "too_many",
    "no_rdma",
]
"""Why a holder lets nobody read."""
REFUSALS: tuple[str, ...] = get_args(Refusal)
REFUSAL_MAX_BYTES = max(map(len, REFUSALS))


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reader's grant, its nonce, the proof that it has the grant's secret, and how the bytes shall come."""

    grant: Grant
    nonce: bytes
    proof: bytes
    transport: Transport = "tcp"


_HELLO = msgspec.json.Decoder(Hello)
"""Made once, at import: msgspec crashes where two threads are the first to decode a type, and readers come at once."""


def read_hello(data: bytes) -> Hello:
    """Errors: msgspec.DecodeError, UnicodeDecodeError."""
    return _HELLO.decode(data)
