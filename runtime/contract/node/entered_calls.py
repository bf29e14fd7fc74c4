"""Entered calls: what a worker writes before it enters a call, and its node reads after the worker's death.

The worker shares one page of memory with its node: a ring of records, one for each call, numbered from 1. It writes the
record before any code of the function sees the call, so a call that the ring should hold and does not hold never ran.
The node publishes the ring with the worker's final status, and the gateway asks it before it fails a call.

A ring forgets. A gateway therefore knows how many calls the worker had entered when its own call was sent: each
response carries that number (ENTERED_HEADER). Only if the ring still holds all later calls does it prove anything; no
clock is compared.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

RECORDS = 256
"""Records of the ring: one page of memory, and 2.7 KiB in the final status of a worker that died. Far more than the
calls that most functions have at a time, so that the ring holds all that were entered since a response was seen."""
_RECORD = struct.Struct("<Q8s")
"""A call's number, and the digest of its request id."""
RING_BYTES = RECORDS * _RECORD.size


class EnteredCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that a dead worker had entered."""

    count: int
    """All of them, since its start."""
    latest: bytes = b""
    """Digests of the latest ones, 8 bytes each, oldest first."""

    def excludes(self, request: str, known: int) -> bool:
        """True if this call was not among those entered after the first `known` ones."""
        held = len(self.latest) // 8
        if self.count - held > known:
            return False
        digest = digest_of(request)
        return all(self.latest[8 * at : 8 * at + 8] != digest for at in range(held))


def digest_of(request: str) -> bytes:
    return hashlib.blake2b(request.encode(), digest_size=8).digest()


def encode_record(number: int, request: str) -> tuple[int, bytes]:
    """Offset in the ring and record of a call."""
    return (number - 1) % RECORDS * _RECORD.size, _RECORD.pack(number, digest_of(request))


def decode_ring(ring: bytes) -> EnteredCalls | None:
    """The calls of a ring; None if it is not as a worker leaves it. Untrusted: user code can write to it.

    The record that the next call would have overwritten is left out, since the worker may have died amid writing it.
    """
    if len(ring) != RING_BYTES:
        return None
    records = list(_RECORD.iter_unpack(ring))
    count = max(number for number, _ in records)
    first = max(1, count - RECORDS + 1)
    if any(number and not (first <= number and (number - 1) % RECORDS == at) for at, (number, _) in enumerate(records)):
        return None
    numbers = range(max(1, count - RECORDS + 2), count + 1)
    latest = [records[(number - 1) % RECORDS] for number in numbers]
    if any(found != number for number, (found, _) in zip(numbers, latest, strict=True)):
        return None
    return EnteredCalls(count=count, latest=b"".join(digest for _, digest in latest))
