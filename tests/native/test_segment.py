"""Regions: nobody but the owner writes them, nobody at all resizes them, and views of them outlive them."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.dlpack import from_dlpack

from fleetstart.native import Region, copy_checksum, xxh64
from fleetstart.runtime.contract.manifest import DTYPE_BYTES
from tests.native.neighbours import (
    F_SEAL_FUTURE_WRITE,
    SEALS,
    Start,
    hear,
    lets_others_run,
    mappings_of,
    memory_with,
    open_descriptors,
    say,
)

MIB = 1024 * 1024
PAGE = mmap.PAGESIZE

TORCH_OF = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
    "F8_E4M3": torch.uint8, "F8_E5M2": torch.uint8, "F8_E8M0": torch.uint8,
}  # fmt: skip


def attached(region: Region) -> Region:
    return Region.attach(os.dup(region.fd))


def test_what_the_owner_writes_is_what_everybody_reads() -> None:
    owner = Region.create("shared", 3 * PAGE)
    reader = attached(owner)
    assert bytes(reader.view(0, 3 * PAGE)) == bytes(3 * PAGE)
    owner.view(PAGE - 2, 4)[:] = b"abcd"
    assert bytes(reader.view(PAGE - 2, 4)) == b"abcd"
    assert bytes(attached(owner).view(PAGE - 2, 4)) == b"abcd"
    assert reader.size_bytes == owner.size_bytes == 3 * PAGE


def test_an_odd_size_is_kept_to_the_byte() -> None:
    owner = Region.create("odd", PAGE + 3)
    assert attached(owner).size_bytes == PAGE + 3
    assert owner.view(0, PAGE + 3).nbytes == PAGE + 3
    with pytest.raises(IndexError):
        owner.view(0, PAGE + 4)


def test_views_are_writable_for_the_owner_alone() -> None:
    owner = Region.create("views", 100)
    assert not owner.view(0, 100).readonly
    view = attached(owner).view(0, 100)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(BufferError):
        copy_checksum(view, b"x")


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_a_view_lies_inside_or_is_an_index_error(offset: int, size: int) -> None:
    region = Region.create("bounds", 1000)
    if 0 <= offset <= 1000 and 0 <= size <= 1000 - offset:
        assert region.view(offset, size).nbytes == size
    else:
        with pytest.raises(IndexError):
            region.view(offset, size)
        with pytest.raises(IndexError):
            region.populate(offset, size)


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (1000, 0), (0, 1000), (999, 1), (1, 999)])
def test_views_reach_every_edge(offset: int, size: int) -> None:
    region = Region.create("edges", 1000)
    assert region.view(offset, size).nbytes == size
    region.populate(offset, size)


@pytest.mark.parametrize("offset", [2**64 - 1, 2**63, 1001, -1])
def test_an_offset_that_would_overflow_is_an_index_error(offset: int) -> None:
    region = Region.create("overflow", 1000)
    for size in (0, 1, 2, 2**64 - 1):
        with pytest.raises(IndexError):
            region.view(offset, size)


# ── nobody can harm the other ──────────────────────────────────────────────────────────────────────


def test_what_a_reader_writes_nobody_else_sees() -> None:
    owner = Region.create("private", 2 * PAGE)
    owner.view(0, 4)[:] = b"true"
    writer, other = attached(owner), attached(owner)
    tensor = from_dlpack(writer.dlpack(0, [4], "U8"))
    tensor.zero_()
    assert bytes(writer.view(0, 4)) == bytes(4)
    assert bytes(owner.view(0, 4)) == bytes(other.view(0, 4)) == b"true"


def test_a_page_that_a_reader_wrote_no_longer_follows_the_owner_and_others_do() -> None:
    owner = Region.create("copied", 2 * PAGE)
    reader = attached(owner)
    from_dlpack(reader.dlpack(0, [1], "U8")).fill_(7)
    owner.view(8, 1)[:] = b"x"
    owner.view(PAGE, 1)[:] = b"y"
    assert bytes(reader.view(8, 1)) == b"\0"
    assert bytes(reader.view(PAGE, 1)) == b"y"


def test_whoever_has_the_descriptor_can_neither_write_nor_resize() -> None:
    owner = Region.create("sealed", PAGE)
    view = owner.view(0, PAGE)
    again = os.open(f"/proc/self/fd/{owner.fd}", os.O_RDWR)
    for descriptor in (owner.fd, again):
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
        Region.attach(memory_with(b"x" * PAGE, SEALS & ~missing))
    assert open_descriptors() == before


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="not shared memory that can be sealed"):
        Region.attach(os.open("/dev/null", os.O_RDWR))
    with pytest.raises(OSError, match="not shared memory that can be sealed"):
        Region.attach(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    with pytest.raises(OSError, match="Bad file descriptor"):
        Region.attach(-1)
    assert open_descriptors() == before


def test_an_empty_sealed_memfd_is_refused() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        Region.attach(memory_with(b""))


@pytest.mark.parametrize("size", [0, -1, 2**63 - 1, 1 << 62])
def test_a_size_that_cannot_be_is_an_os_error(size: int) -> None:
    before = open_descriptors()
    with pytest.raises((OSError, TypeError)):
        Region.create("size", size)
    assert open_descriptors() == before


# ── lifetimes ──────────────────────────────────────────────────────────────────────────────────────


def test_views_tensors_and_slices_outlive_the_region_and_the_last_one_unmaps_it() -> None:
    region = Region.create("outlived", MIB)
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
    region = Region.create("unused", PAGE)
    capsule = region.dlpack(0, [1], "F32")
    del region
    assert mappings_of("unused") == 1
    del capsule
    assert mappings_of("unused") == 0


def test_the_memory_outlives_its_owner() -> None:
    owner = Region.create("inherited", PAGE)
    owner.view(0, 2)[:] = b"ok"
    reader = attached(owner)
    del owner
    gc.collect()
    assert bytes(reader.view(0, 2)) == b"ok"


def test_no_descriptor_and_no_mapping_leaks() -> None:
    before = open_descriptors()
    for _ in range(300):
        owner = Region.create("leak", PAGE)
        reader = attached(owner)
        from_dlpack(reader.dlpack(0, [3], "F32")).add_(1)
        with pytest.raises(IndexError):
            reader.dlpack(0, [PAGE], "F32")
        with pytest.raises(PermissionError):
            Region.attach(memory_with(b"x", 0))
    del owner, reader
    gc.collect()
    assert open_descriptors() == before
    assert mappings_of("leak") == mappings_of("stranger") == 0


def test_descriptors_do_not_reach_programs_that_are_started() -> None:
    assert not os.get_inheritable(Region.create("inherit", PAGE).fd)


# ── tensors ────────────────────────────────────────────────────────────────────────────────────────


def test_every_dtype_of_a_manifest_has_its_tensor() -> None:
    assert TORCH_OF.keys() == DTYPE_BYTES.keys()


@pytest.mark.parametrize("dtype", TORCH_OF)
def test_tensors_are_the_bytes_at_their_offset(dtype: str) -> None:
    width = DTYPE_BYTES[dtype]
    owner = Region.create("dtypes", PAGE)
    content = bytes(index % 2 for index in range(6 * width))
    owner.view(64, 6 * width)[:] = content
    tensor = from_dlpack(attached(owner).dlpack(64, [2, 3], dtype))
    assert tensor.dtype is TORCH_OF[dtype]
    assert (tensor.shape, tensor.is_contiguous(), tensor.device.type) == ((2, 3), True, "cpu")
    assert bytes(tensor.view(torch.uint8).flatten().tolist()) == content


@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from(sorted(TORCH_OF)))
def test_any_shape_comes_as_it_is_or_is_an_index_error(shape: list[int], dtype: str) -> None:
    region = Region.create("shapes", PAGE)
    count = torch.Size(shape).numel()
    if count * DTYPE_BYTES[dtype] > PAGE:
        with pytest.raises(IndexError):
            region.dlpack(0, shape, dtype)
        return
    tensor = from_dlpack(region.dlpack(0, shape, dtype))
    assert (list(tensor.shape), tensor.numel(), tensor.is_contiguous()) == (shape, count, True)


def test_scalars_and_tensors_without_elements() -> None:
    owner = Region.create("corners", PAGE)
    from_dlpack(owner.dlpack(PAGE - 4, [1], "F32")).fill_(2.5)
    scalar = from_dlpack(owner.dlpack(PAGE - 4, [], "F32"))
    assert (scalar.shape, scalar.item()) == ((), 2.5)
    assert from_dlpack(owner.dlpack(PAGE, [0, 7], "F32")).shape == (0, 7)
    assert from_dlpack(owner.dlpack(0, [2**40, 0, 2**40], "F64")).shape == (2**40, 0, 2**40)


@pytest.mark.parametrize(
    ("offset", "shape", "dtype", "error"),
    [
        (0, [PAGE + 1], "U8", IndexError),
        (PAGE, [1], "U8", IndexError),
        (-4, [1], "F32", IndexError),
        (2**64 - 4, [1], "F32", IndexError),
        (4, [2**62, 4], "F32", IndexError),
        (0, [2**32, 2**32], "U8", IndexError),
        (0, [2**63 - 1] * 3, "F64", IndexError),
        (0, [-1], "F32", ValueError),
        (0, [-1, -1], "F32", ValueError),
        (0, [0, -1], "F32", ValueError),
        (2, [1], "F32", ValueError),
        (1, [0], "BF16", ValueError),
        (0, [1], "F31", ValueError),
        (0, [1], "", ValueError),
        (0, [1] * 65, "U8", ValueError),
    ],
)
def test_tensors_that_cannot_be(offset: int, shape: list[int], dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Region.create("hostile", PAGE).dlpack(offset, shape, dtype)


# ── two processes ──────────────────────────────────────────────────────────────────────────────────

READ_ALL = """
import sys
from fleetstart.native import Region, xxh64
def rollup():
    with open("/proc/self/smaps_rollup") as file:
        fields = {line.split(":")[0]: int(line.split()[1]) for line in list(file)[1:]}
    return fields["Rss"], fields["Pss"], fields["Private_Clean"] + fields["Private_Dirty"]
before = rollup()
region = Region.attach(int(sys.argv[1]))
print(xxh64(region.view(0, region.size_bytes)))
input()
print(*(b - a for a, b in zip(before, rollup())))
input()
"""


def test_two_processes_that_read_every_page_share_one_copy(start: Start) -> None:
    size = 64 * MIB
    owner = Region.create("weights", size)
    pattern = os.urandom(MIB)
    for offset in range(0, size, MIB):
        owner.view(offset, MIB)[:] = pattern
    expected = xxh64(owner.view(0, size))
    children = [start(READ_ALL, owner.fd) for _ in range(2)]
    assert [hear(child) for child in children] == [str(expected)] * 2
    for child in children:  # both have touched all of it, and both still have it mapped
        say(child, "measure")
        rss_kib, pss_kib, private_kib = map(int, hear(child).split())
        assert rss_kib >= size // 1024
        assert private_kib < 4 * 1024, "pages were copied"
        assert pss_kib < size // 1024 // 2, "a third each, of three processes"


CRASH_IF_UNSAFE = """
import gc, sys
import torch
from fleetstart.native import Region
region = Region.attach(int(sys.argv[1]))
rows = [torch.from_dlpack(region.dlpack(0, [256, 1024], "F32"))[at] for at in range(0, 256, 16)]
del region
gc.collect()
for row in rows:
    row.mul_(2)
print(sum(int(row.sum()) for row in rows))
"""


def test_a_process_that_works_in_place_after_the_region_is_gone_lives_and_changes_nothing(start: Start) -> None:
    owner = Region.create("inplace", MIB)
    from_dlpack(owner.dlpack(0, [256, 1024], "F32")).fill_(1)
    before = xxh64(owner.view(0, MIB))
    assert hear(start(CRASH_IF_UNSAFE, owner.fd)) == str(16 * 1024 * 2)
    assert xxh64(owner.view(0, MIB)) == before


# ── populate ───────────────────────────────────────────────────────────────────────────────────────


def resident_kib(name: str) -> int:
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if f"memfd:{name} " in line:
                return next(int(field.split()[1]) for field in lines if field.startswith("Rss:"))
    return 0


def test_populate_maps_exactly_the_pages_of_the_range() -> None:
    owner = Region.create("populated", 64 * PAGE)
    assert resident_kib("populated") == 0
    owner.populate(PAGE + 10, 2 * PAGE)
    assert resident_kib("populated") == 3 * PAGE // 1024
    owner.populate(0, 64 * PAGE)
    assert resident_kib("populated") == 64 * PAGE // 1024
    assert bytes(owner.view(0, 64 * PAGE)) == bytes(64 * PAGE)


def test_populate_of_a_reader_copies_nothing() -> None:
    owner = Region.create("followed", 64 * PAGE)
    owner.view(0, 1)[:] = b"a"
    reader = attached(owner)
    reader.populate(0, 64 * PAGE)
    owner.view(0, 1)[:] = b"b"
    assert bytes(reader.view(0, 1)) == b"b"


def test_populate_lets_other_threads_run() -> None:
    def fresh() -> None:
        region = Region.create("busy", 8 * MIB)
        region.populate(0, 8 * MIB)

    assert lets_others_run(fresh)


def test_threads_that_write_their_own_ranges_do_not_disturb_each_other() -> None:
    owner = Region.create("threads", 8 * MIB)
    edges = list(range(0, 8 * MIB + 1, 8 * MIB // 16))
    contents = [os.urandom(end - begin) for begin, end in pairwise(edges)]

    def write(begin: int, content: bytes) -> Callable[[], None]:
        def repeatedly() -> None:
            for _ in range(5):
                copy_checksum(owner.view(begin, len(content)), content)

        return repeatedly

    threads = [threading.Thread(target=write(*pair)) for pair in zip(edges, contents, strict=False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert bytes(owner.view(0, 8 * MIB)) == b"".join(contents)
