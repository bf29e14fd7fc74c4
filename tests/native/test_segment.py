"""Regions: nobody but the owner writes them, nobody at all resizes them, and views of them outlive them."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.dlpack import from_dlpack

from fleetstart.native import Region, read_checksum
from tests.native.neighbours import (
    F_SEAL_FUTURE_WRITE,
    SEALS,
    attached,
    mappings_of,
    memory_with,
    open_descriptors,
    owned,
)

MIB = 1024 * 1024
PAGE = mmap.PAGESIZE


def test_what_the_owner_writes_is_what_everybody_reads() -> None:
    owner = owned(3 * PAGE)
    reader = attached(owner)
    assert bytes(reader.view(0, 3 * PAGE)) == bytes(3 * PAGE)
    owner.view(PAGE - 2, 4)[:] = b"abcd"
    assert bytes(reader.view(PAGE - 2, 4)) == b"abcd"
    assert bytes(attached(owner).view(PAGE - 2, 4)) == b"abcd"
    assert reader.size_bytes == owner.size_bytes == 3 * PAGE


def test_an_odd_size_is_kept_to_the_byte() -> None:
    owner = owned(PAGE + 3)
    assert attached(owner).size_bytes == PAGE + 3
    assert owner.view(0, PAGE + 3).nbytes == PAGE + 3
    with pytest.raises(IndexError):
        owner.view(0, PAGE + 4)


def test_views_are_writable_for_the_owner_alone() -> None:
    owner = owned(100)
    assert not owner.view(0, 100).readonly
    view = attached(owner).view(0, 100)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    with open("/proc/self/exe", "rb") as file, pytest.raises(BufferError):
        read_checksum(file.fileno(), 0, view)


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_a_view_lies_inside_or_is_an_index_error(offset: int, size: int) -> None:
    region = owned(1000)
    if 0 <= offset <= 1000 and 0 <= size <= 1000 - offset:
        assert region.view(offset, size).nbytes == size
    else:
        with pytest.raises(IndexError):
            region.view(offset, size)
        with pytest.raises(IndexError):
            region.populate(offset, size)


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (1000, 0), (0, 1000), (999, 1), (1, 999)])
def test_views_reach_every_edge(offset: int, size: int) -> None:
    region = owned(1000)
    assert region.view(offset, size).nbytes == size
    region.populate(offset, size)


@pytest.mark.parametrize("offset", [2**64 - 1, 2**63, 1001, -1])
def test_an_offset_that_would_overflow_is_an_index_error(offset: int) -> None:
    region = owned(1000)
    for size in (0, 1, 2, 2**64 - 1):
        with pytest.raises(IndexError):
            region.view(offset, size)


# ── nobody can harm the other ──────────────────────────────────────────────────────────────────────


def test_what_a_reader_writes_nobody_else_sees() -> None:
    owner = owned(2 * PAGE)
    owner.view(0, 4)[:] = b"true"
    writer, other = attached(owner), attached(owner)
    tensor = from_dlpack(writer.dlpack(0, [4], "U8"))
    tensor.zero_()
    assert bytes(writer.view(0, 4)) == bytes(4)
    assert bytes(owner.view(0, 4)) == bytes(other.view(0, 4)) == b"true"


def test_a_page_that_a_reader_wrote_no_longer_follows_the_owner_and_others_do() -> None:
    owner = owned(2 * PAGE)
    reader = attached(owner)
    from_dlpack(reader.dlpack(0, [1], "U8")).fill_(7)
    owner.view(8, 1)[:] = b"x"
    owner.view(PAGE, 1)[:] = b"y"
    assert bytes(reader.view(8, 1)) == b"\0"
    assert bytes(reader.view(PAGE, 1)) == b"y"


def test_its_reader_is_shared_and_follows_the_owner_whatever_was_written_here() -> None:
    owner = owned(2 * PAGE)
    region = attached(owner)
    from_dlpack(region.dlpack(PAGE, [4], "U8")).zero_()
    owner.view(PAGE, 6)[:] = b"theirs"
    reader = region.reader
    assert bytes(region.view(PAGE, 4)) == bytes(4)
    assert reader.view(0, 1).readonly
    del region
    assert bytes(reader.view(PAGE, 6)) == bytes(owner.reader.view(PAGE, 6)) == b"theirs"


def test_whoever_has_the_descriptor_can_neither_write_nor_resize() -> None:
    owner = owned(PAGE)
    view = owner.view(0, PAGE)
    (fd,) = owner.fds
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for descriptor in (fd, again):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        for size in (0, PAGE - 1, PAGE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    readable = mmap.mmap(again, PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
    view[0] = 9
    assert readable[0] == 9
    readable.close()
    os.close(again)


@pytest.mark.parametrize("missing", [0x2, 0x4, F_SEAL_FUTURE_WRITE], ids=["shrink", "grow", "write"])
def test_memory_without_a_seal_is_refused(missing: int) -> None:
    before = open_descriptors()
    with pytest.raises(PermissionError, match="without the seals"):
        Region.attach([memory_with(b"x" * PAGE), memory_with(b"x" * PAGE, SEALS & ~missing)], PAGE)
    assert open_descriptors() == before


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="not shared memory that can be sealed"):
        Region.attach([os.open("/dev/null", os.O_RDWR)], PAGE)
    with pytest.raises(OSError, match="not shared memory that can be sealed"):
        Region.attach([os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)], PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Region.attach([-1], PAGE)
    assert open_descriptors() == before


@pytest.mark.parametrize("size", [0, 1])
def test_memory_that_is_empty_is_refused(size: int) -> None:
    for fds in ([], [memory_with(b"")]):
        with pytest.raises(OSError, match="Invalid argument"):
            Region.attach(fds, size)


@pytest.mark.parametrize("size", [PAGE + 1, 2**63, 2**64 - 1])
def test_memory_that_is_shorter_than_its_region_is_refused(size: int) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match=f"{PAGE} bytes for a region of {size}"):
        Region.attach([memory_with(b"x" * PAGE)], size)
    assert open_descriptors() == before


def test_sizes_that_wrap_to_a_small_one_are_refused_before_anything_is_mapped() -> None:
    before = open_descriptors()
    vast = [memory_with(b"", 0) for _ in range(3)]
    for fd, size in zip(vast, [4 * PAGE, 2**63 - PAGE, 2**63 - PAGE], strict=True):
        os.truncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(OSError, match="Invalid argument"):
        Region.attach(vast, PAGE)
    assert mappings_of("stranger") == 0
    assert open_descriptors() == before


def test_memory_after_which_nothing_can_follow_is_refused_unless_it_is_the_last() -> None:
    assert (
        bytes(Region.attach([memory_with(b"ab" * PAGE), memory_with(b"odd")], 2 * PAGE + 3).view(2 * PAGE, 3)) == b"odd"
    )
    before = open_descriptors()
    with pytest.raises(OSError, match="Invalid argument"):
        Region.attach([memory_with(b"odd"), memory_with(b"ab" * PAGE)], PAGE)
    assert open_descriptors() == before


# ── lifetimes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_views_tensors_and_slices_outlive_the_region_and_the_last_one_unmaps_it() -> None:
    region = owned(MIB, "outlived")
    region.view(0, 8)[:] = b"weights!"
    view = region.view(0, 8)
    part = view[2:4]
    tensor = from_dlpack(region.dlpack(0, [2, 4], "U8"))
    column = tensor[:, 1:3]
    capsule = region.dlpack(0, [8], "U8")
    del region, view, tensor
    gc.collect()
    assert mappings_of("outlived") == 1
    assert bytes(part) == b"ig"
    assert column.tolist() == [[ord("e"), ord("i")], [ord("t"), ord("s")]]
    assert bytes(from_dlpack(capsule).tolist()) == b"weights!"
    del part, column, capsule
    gc.collect()
    assert mappings_of("outlived") == 0


def test_a_capsule_that_nobody_used_frees_what_it_holds() -> None:
    region = owned(PAGE, "unused")
    capsule = region.dlpack(0, [1], "F32")
    del region
    assert mappings_of("unused") == 1
    del capsule
    assert mappings_of("unused") == 0


@pytest.mark.slow
def test_the_memory_outlives_its_owner() -> None:
    owner = owned(PAGE)
    owner.view(0, 2)[:] = b"ok"
    reader = attached(owner)
    del owner
    gc.collect()
    assert bytes(reader.view(0, 2)) == b"ok"


@pytest.mark.slow
def test_no_descriptor_and_no_mapping_leaks() -> None:
    before = open_descriptors()
    for _ in range(300):
        owner = owned(PAGE, "leak")
        reader = attached(owner)
        from_dlpack(reader.dlpack(0, [3], "F32")).add_(1)
        with pytest.raises(IndexError):
            reader.dlpack(0, [PAGE], "F32")
        with pytest.raises(PermissionError):
            Region.attach([memory_with(b"x", 0)], 1)
    del owner, reader
    gc.collect()
    assert open_descriptors() == before
    assert mappings_of("leak") == mappings_of("stranger") == 0


def test_descriptors_do_not_reach_programs_that_are_started() -> None:
    region = owned(PAGE)
    assert not os.get_inheritable(region.fds[0])
