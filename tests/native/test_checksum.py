"""XXH3 against the reference implementation, of buffers that are there and of buffers that fill."""

from __future__ import annotations

import os
from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.native import Checksum, xxh3
from tests.native.neighbours import lets_others_run

MIB = 1024 * 1024
# Around what is hashed in ways of its own (3, 8, 16, 128, 240), a stripe (64), a block (1024) and a prefetch (2 KiB).
EDGES = sorted({edge + step for edge in (3, 8, 16, 64, 128, 240, 1024, 2048, 16384) for step in range(-2, 3)} | {0})
BYTES = os.urandom(MIB + 64)


@given(st.binary(max_size=3000))
def test_hash_of_any_bytes_is_the_reference_s(data: bytes) -> None:
    assert xxh3(data) == xxhash.xxh3_64_intdigest(data)


@given(st.integers(0, 70), st.integers(0, 5000) | st.integers(MIB - 50, MIB))
def test_hash_at_any_alignment_is_the_reference_s(begin: int, size: int) -> None:
    part = memoryview(BYTES)[begin : begin + size]
    assert xxh3(part) == xxhash.xxh3_64_intdigest(part)


@pytest.mark.parametrize("size", EDGES)
def test_hash_is_the_reference_s_around_every_inner_boundary(size: int) -> None:
    data = BYTES[:size]
    expected = xxhash.xxh3_64_intdigest(data)
    assert xxh3(data) == expected
    for ready in {0, size // 2, size}:
        checksum = Checksum(data)
        checksum.advance(ready)
        assert checksum.digest() == expected


@pytest.mark.parametrize(
    "buffer",
    [b"0123456789abcdef", bytearray(b"x" * 40), array("d", [1.0, 2.0]), np.arange(12, dtype=np.float32).reshape(3, 4)],
    ids=["bytes", "bytearray", "array", "numpy"],
)
def test_any_contiguous_buffer_will_do(buffer: bytes) -> None:
    assert xxh3(buffer) == Checksum(buffer).digest() == xxhash.xxh3_64_intdigest(memoryview(buffer).cast("B"))


@pytest.mark.parametrize("hashing", [xxh3, Checksum])
def test_buffers_with_gaps_are_refused(hashing: type[Checksum]) -> None:
    with pytest.raises((BufferError, ValueError)):
        hashing(memoryview(b"abcdef")[::2])
    with pytest.raises((BufferError, ValueError)):
        hashing(np.zeros((4, 4)).T[::2])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hashing("text")  # type: ignore[arg-type]


# ── buffers that fill ──────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 9000), st.lists(st.integers(0, 9000), max_size=8))
def test_pieces_of_any_size_make_the_hash_of_the_whole(size: int, pieces: list[int]) -> None:
    data = BYTES[:size]
    buffer = bytearray(size)
    checksum = Checksum(buffer)
    for ready in sorted(min(piece, size) for piece in pieces):
        buffer[:ready] = data[:ready]
        checksum.advance(ready)
    buffer[:] = data
    assert checksum.digest() == xxhash.xxh3_64_intdigest(data)


def test_asking_twice_gives_the_same_and_asking_early_harms_nothing() -> None:
    buffer = bytearray(5000)
    checksum = Checksum(buffer)
    for _ in range(2):
        assert checksum.digest() == xxhash.xxh3_64_intdigest(buffer)
    buffer[:] = BYTES[:5000]
    assert checksum.digest() == xxhash.xxh3_64_intdigest(buffer)


def test_saying_less_than_before_changes_nothing() -> None:
    checksum = Checksum(BYTES)
    for ready in (500_000, 10, 600_000, 0):
        checksum.advance(ready)
    assert checksum.digest() == xxhash.xxh3_64_intdigest(BYTES)


def test_more_than_the_buffer_cannot_be_ready() -> None:
    checksum = Checksum(bytes(2000))
    with pytest.raises(ValueError, match="2001 bytes of a buffer of 2000"):
        checksum.advance(2001)
    with pytest.raises(TypeError):
        checksum.advance(-1)
    assert checksum.digest() == xxhash.xxh3_64_intdigest(bytes(2000))


def test_a_buffer_cannot_be_resized_while_it_is_hashed_and_can_afterwards() -> None:
    buffer = bytearray(64)
    checksum = Checksum(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del checksum
    buffer.extend(b"more")


# ── the GIL ────────────────────────────────────────────────────────────────────────────────────────


def test_hashing_lets_other_threads_run() -> None:
    source = bytes(16 * MIB)
    assert lets_others_run(lambda: xxh3(source))
    assert lets_others_run(lambda: Checksum(source).advance(16 * MIB))
    assert lets_others_run(lambda: Checksum(source).digest())


def test_the_proof_above_can_fail() -> None:
    assert not lets_others_run(lambda: sum(range(1000)), patience_s=1.0)
