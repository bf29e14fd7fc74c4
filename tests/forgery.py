"""Forges XXH3-64: other bytes with the same checksum, as whoever may write to a store could.

Of each block of 1,024 bytes, XXH3 adds up 16 stripes of 64 bytes in eight lanes, and mixes after the block. A stripe
adds its own bytes to the neighbouring lane, and to its own the product of the halves of bytes xor secret. Two stripes
whose products are made zero have 64 free bits a lane together, by which the sums are put where they were.
"""

from __future__ import annotations

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of XXH3."""
STRIPE_BYTES = 64
BLOCK_BYTES = 1024
FORGED_BYTES = BLOCK_BYTES - 2 * STRIPE_BYTES
LOW, ALL = (1 << 32) - 1, (1 << 64) - 1


def forge(data: bytes, begin: bytes) -> bytes:
    """Bytes that begin with `begin`, of FORGED_BYTES, and have the checksum of `data`, of two blocks at least."""
    assert len(begin) == FORGED_BYTES
    assert len(data) >= 2 * BLOCK_BYTES
    wanted, found = _lanes(data[:BLOCK_BYTES]), _lanes(begin)
    first, second = bytearray(), bytearray()
    for lane in range(8):
        missing = (wanted[lane ^ 1] - found[lane ^ 1]) & ALL
        low, high = _word(SECRET, 14 * 8 + lane * 8) & LOW, _word(SECRET, 15 * 8 + lane * 8) >> 32
        # The first stripe's low half and the second's high half equal the secret's: their products are zero.
        rest = (missing - low - (high << 32)) & ALL
        first += ((rest >> 32 << 32) | low).to_bytes(8, "little")
        second += ((high << 32) | (rest & LOW)).to_bytes(8, "little")
    return begin + bytes(first) + bytes(second) + data[BLOCK_BYTES:]


def _lanes(stripes: bytes) -> list[int]:
    lanes = [0] * 8
    for number in range(len(stripes) // STRIPE_BYTES):
        for lane in range(8):
            word = _word(stripes, number * STRIPE_BYTES + lane * 8)
            mixed = word ^ _word(SECRET, number * 8 + lane * 8)
            lanes[lane ^ 1] += word
            lanes[lane] += (mixed & LOW) * (mixed >> 32)
    return lanes


def _word(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little")
