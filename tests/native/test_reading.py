"""Reads with a checksum: exactly the range, through the page cache or past it, and what the system said otherwise."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.native import cached_bytes, read_checksum, read_direct
from tests.native.neighbours import lets_others_run, open_descriptors, owned

MIB = 1024 * 1024
ALIGNED = 4096
SIZE = 3 * ALIGNED + 1000
BYTES = os.urandom(MIB + 64)


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[int]:
    """A file of SIZE bytes, opened for reads past the page cache."""
    (tmp_path / "direct").write_bytes(BYTES[:SIZE])
    try:
        descriptor = os.open(tmp_path / "direct", os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"O_DIRECT: {error}")
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("size", [1, 240, 1024, *(256 * 1024 + step for step in (-1, 0, 1)), MIB + 3])
def test_read_and_its_hash_agree_with_the_file(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES[:size])
    into = bytearray(size)
    with open(tmp_path / "file", "rb") as file:
        assert read_checksum(file.fileno(), 0, into) == xxhash.xxh3_64_intdigest(BYTES[:size])
    assert into == BYTES[:size]


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_read_takes_exactly_the_range_asked_for(offset: int, size: int) -> None:
    descriptor = os.memfd_create("file")
    try:
        os.write(descriptor, BYTES[:3000])
        destination = bytearray(size)
        if offset + size <= 3000 or size == 0:
            expected = BYTES[offset : offset + size]
            assert read_checksum(descriptor, offset, destination) == xxhash.xxh3_64_intdigest(expected)
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


def test_a_read_only_destination_is_refused() -> None:
    with open("/proc/self/exe", "rb") as file:
        with pytest.raises(BufferError):
            read_checksum(file.fileno(), 0, b"1234")
        with pytest.raises(BufferError):
            read_direct(file.fileno(), 0, b"1234", 4)


def test_reads_let_other_threads_run(tmp_path: Path) -> None:
    descriptor = os.memfd_create("file")
    os.truncate(descriptor, 16 * MIB)
    into = bytearray(16 * MIB)
    assert lets_others_run(lambda: read_checksum(descriptor, 0, into))
    assert lets_others_run(lambda: read_direct(descriptor, 0, into, len(into)))
    os.close(descriptor)


# ── past the page cache ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, ALIGNED - 1, ALIGNED, ALIGNED + 1, 2 * ALIGNED, 2 * ALIGNED + 77])
@pytest.mark.parametrize("offset", [0, ALIGNED])
def test_a_direct_read_is_its_range_and_zeros_after_it(direct: int, offset: int, size: int) -> None:
    room = -(-size // ALIGNED) * ALIGNED
    region = owned(2 * SIZE)
    region.view(0, 2 * SIZE)[:] = b"\xaa" * 2 * SIZE
    expected = BYTES[offset : offset + size]

    checksum = read_direct(direct, offset, region.view(ALIGNED, room), size)

    assert checksum == xxhash.xxh3_64_intdigest(expected)
    assert bytes(region.view(ALIGNED, room)) == expected + bytes(room - size)
    assert bytes(region.view(0, ALIGNED)) == b"\xaa" * ALIGNED
    assert bytes(region.view(ALIGNED + room, ALIGNED)) == b"\xaa" * ALIGNED


def test_a_direct_read_ends_with_the_file(direct: int) -> None:
    region = owned(4 * ALIGNED)
    last = SIZE - 2 * ALIGNED
    tail = BYTES[2 * ALIGNED : SIZE]
    assert read_direct(direct, 2 * ALIGNED, region.view(0, 4 * ALIGNED), last) == xxhash.xxh3_64_intdigest(tail)
    with pytest.raises(EOFError, match=f"{last + 1} bytes wanted at offset {2 * ALIGNED}, the file has {last} there"):
        read_direct(direct, 2 * ALIGNED, region.view(0, 4 * ALIGNED), last + 1)
    with pytest.raises(EOFError, match="the file has 0 there"):
        read_direct(direct, 8 * ALIGNED, region.view(0, ALIGNED), 1)


def test_a_direct_read_says_what_cannot_be(direct: int) -> None:
    region = owned(2 * ALIGNED)
    with pytest.raises(ValueError, match="8193 bytes do not fit into a destination of 8192"):
        read_direct(direct, 0, region.view(0, 2 * ALIGNED), 2 * ALIGNED + 1)
    with pytest.raises(OSError, match="Invalid argument"):
        read_direct(direct, -ALIGNED, region.view(0, ALIGNED), 1)
    with pytest.raises(OSError, match="Invalid argument"):
        read_direct(direct, 2**63 - ALIGNED, region.view(0, 2 * ALIGNED), 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_direct(-1, 0, region.view(0, ALIGNED), 1)


# ── what the page cache holds ──────────────────────────────────────────────────────────────────────


def test_cached_bytes_counts_what_was_read_and_what_was_dropped(tmp_path: Path) -> None:
    path = tmp_path / "cached"
    path.write_bytes(BYTES[:MIB])
    with open(path, "rb+") as file:
        descriptor = file.fileno()
        os.fsync(descriptor)
        if cached_bytes(descriptor, 0, MIB) == 0:
            pytest.skip("this kernel does not tell (before 6.5)")
        assert cached_bytes(descriptor, 0, MIB) == MIB
        assert cached_bytes(descriptor, mmap.PAGESIZE, 2 * mmap.PAGESIZE) == 2 * mmap.PAGESIZE
        assert cached_bytes(descriptor, 10, 20) == 20
        assert cached_bytes(descriptor, 2 * MIB, MIB) == cached_bytes(descriptor, 0, 0) == 0
        os.posix_fadvise(descriptor, 0, MIB, os.POSIX_FADV_DONTNEED)
        assert cached_bytes(descriptor, 0, MIB) < MIB


def test_cached_bytes_of_what_has_none_is_nothing() -> None:
    reader, writer = os.pipe()
    assert cached_bytes(reader, 0, 100) == cached_bytes(-1, 0, 100) == 0
    os.close(reader)
    os.close(writer)
