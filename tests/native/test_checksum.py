"""xxh64 against the reference implementation, alone and fused with copies and reads."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.native import copy_checksum, read_checksum, xxh64
from tests.native.neighbours import lets_others_run, open_descriptors

MIB = 1024 * 1024
# Around a stripe (32), a prefetch (2 KiB), a read block (256 KiB) and where copies go past the caches (1 MiB).
EDGES = [edge + step for edge in (32, 2048, 256 * 1024, MIB) for step in (-33, -1, 0, 1, 4, 8, 31) if edge + step > 0]
BYTES = os.urandom(MIB + 64)


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_hash_of_any_bytes_and_seed_is_the_reference_s(data: bytes, seed: int) -> None:
    assert xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)


@pytest.mark.parametrize("size", EDGES)
def test_hash_copy_and_read_agree_with_the_reference_around_every_inner_boundary(size: int, tmp_path: Path) -> None:
    data = BYTES[:size]
    expected = xxhash.xxh64_intdigest(data)
    assert xxh64(data) == expected
    copied = bytearray(size + 1)
    assert copy_checksum(copied, data) == expected
    assert copied == data + b"\0"
    (tmp_path / "file").write_bytes(data)
    read = bytearray(size)
    with open(tmp_path / "file", "rb") as file:
        assert read_checksum(file.fileno(), 0, read) == expected
    assert read == data


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5000) | st.integers(MIB - 50, MIB), st.integers(0, 40))
def test_copy_writes_the_source_s_bytes_and_no_others_at_any_alignment(
    source_at: int, destination_at: int, size: int, after: int
) -> None:
    source = memoryview(BYTES)[source_at : source_at + size]
    destination = bytearray(b"\xaa" * (destination_at + len(source) + after))
    with memoryview(destination) as view:
        assert copy_checksum(view[destination_at:], source) == xxhash.xxh64_intdigest(source)
    assert destination[:destination_at] == b"\xaa" * destination_at
    assert destination[destination_at : destination_at + len(source)] == source
    assert destination[destination_at + len(source) :] == b"\xaa" * after


@pytest.mark.parametrize(
    "buffer",
    [b"0123456789abcdef", bytearray(b"x" * 40), array("d", [1.0, 2.0]), np.arange(12, dtype=np.float32).reshape(3, 4)],
    ids=["bytes", "bytearray", "array", "numpy"],
)
def test_any_contiguous_buffer_will_do(buffer: bytes) -> None:
    assert xxh64(buffer) == xxhash.xxh64_intdigest(memoryview(buffer).cast("B"))


def test_buffers_with_gaps_are_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        xxh64(memoryview(b"abcdef")[::2])
    with pytest.raises((BufferError, ValueError)):
        xxh64(np.zeros((4, 4)).T[::2])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        xxh64("text")  # type: ignore[arg-type]


def test_a_read_only_destination_is_refused() -> None:
    with pytest.raises(BufferError):
        copy_checksum(b"1234", b"1234")
    with open("/proc/self/exe", "rb") as file, pytest.raises(BufferError):
        read_checksum(file.fileno(), 0, b"1234")


def test_a_destination_that_is_too_short_stays_as_it_was() -> None:
    destination = bytearray(7)
    with pytest.raises(ValueError, match="8 bytes do not fit into a destination of 7"):
        copy_checksum(destination, b"x" * 8)
    assert destination == bytes(7)


def test_copying_over_oneself_is_refused() -> None:
    memory = memoryview(bytearray(100))
    with pytest.raises(ValueError, match="overlap"):
        copy_checksum(memory[10:], memory[:50])
    copy_checksum(memory[50:], memory[:50])


def test_a_buffer_cannot_be_resized_while_it_is_used_and_can_afterwards() -> None:
    buffer = bytearray(64)
    copy_checksum(buffer, bytes(64))
    buffer.extend(b"more")


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_read_takes_exactly_the_range_asked_for(offset: int, size: int) -> None:
    descriptor = os.memfd_create("file")
    try:
        os.write(descriptor, BYTES[:3000])
        destination = bytearray(size)
        if offset + size <= 3000 or size == 0:
            expected = BYTES[offset : offset + size]
            assert read_checksum(descriptor, offset, destination) == xxhash.xxh64_intdigest(expected)
            assert destination == expected
        else:
            there = max(0, 3000 - offset)
            with pytest.raises(EOFError, match=f"{size} bytes wanted at offset {offset}, the file has {there} there"):
                read_checksum(descriptor, offset, destination)
    finally:
        os.close(descriptor)


def test_read_says_what_the_system_said(tmp_path: Path) -> None:
    before = open_descriptors()
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="Illegal seek"):
        read_checksum(reader, 0, bytearray(1))
    os.close(reader)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_checksum(reader, 0, bytearray(1))
    os.close(writer)
    with open(tmp_path / "empty", "wb+") as file, pytest.raises(OSError, match="Invalid argument"):
        read_checksum(file.fileno(), -1, bytearray(1))
    with open(tmp_path / "empty", "rb") as file, pytest.raises(OSError, match="Invalid argument"):
        read_checksum(file.fileno(), 2**63 - 1, bytearray(2))
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        read_checksum(directory, 0, bytearray(1))
    os.close(directory)
    assert open_descriptors() == before


def test_hash_copy_and_read_let_other_threads_run() -> None:
    source, destination = bytes(16 * MIB), bytearray(16 * MIB)
    descriptor = os.memfd_create("file")
    os.truncate(descriptor, 16 * MIB)
    assert lets_others_run(lambda: xxh64(source))
    assert lets_others_run(lambda: copy_checksum(destination, source))
    assert lets_others_run(lambda: read_checksum(descriptor, 0, destination))
    os.close(descriptor)


def test_the_proof_above_can_fail() -> None:
    assert not lets_others_run(lambda: sum(range(1000)), patience_s=1.0)
