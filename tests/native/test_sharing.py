"""Sharing of a region between processes and threads: one copy of its pages, mapped on demand, safe from neighbours."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from itertools import pairwise

from torch.utils.dlpack import from_dlpack

from fleetstart.native import xxh3
from tests.native.neighbours import Start, attached, hear, lets_others_run, owned, say

MIB = 1024 * 1024
PAGE = mmap.PAGESIZE


# ── two processes ──────────────────────────────────────────────────────────────────────────────────

READ_ALL = """
import sys
from fleetstart.native import Region, xxh3
def rollup():
    with open("/proc/self/smaps_rollup") as file:
        fields = {line.split(":")[0]: int(line.split()[1]) for line in list(file)[1:]}
    return fields["Rss"], fields["Pss"], fields["Private_Clean"] + fields["Private_Dirty"]
before = rollup()
size = 64 * 1024 * 1024
region = Region.attach([int(sys.argv[1])], size)
print(xxh3(region.view(0, region.size_bytes)))
input()
print(*(b - a for a, b in zip(before, rollup())))
input()
"""


def test_two_processes_that_read_every_page_share_one_copy(start: Start) -> None:
    size = 64 * MIB
    owner = owned(size)
    pattern = os.urandom(MIB)
    for offset in range(0, size, MIB):
        owner.view(offset, MIB)[:] = pattern
    expected = xxh3(owner.view(0, size))
    children = [start(READ_ALL, *owner.fds) for _ in range(2)]
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
region = Region.attach([int(sys.argv[1])], 1024 * 1024)
rows = [torch.from_dlpack(region.dlpack(0, [256, 1024], "F32"))[at] for at in range(0, 256, 16)]
del region
gc.collect()
for row in rows:
    row.mul_(2)
print(sum(int(row.sum()) for row in rows))
"""


def test_a_process_that_works_in_place_after_the_region_is_gone_lives_and_changes_nothing(start: Start) -> None:
    owner = owned(MIB)
    from_dlpack(owner.dlpack(0, [256, 1024], "F32")).fill_(1)
    before = xxh3(owner.view(0, MIB))
    assert hear(start(CRASH_IF_UNSAFE, *owner.fds)) == str(16 * 1024 * 2)
    assert xxh3(owner.view(0, MIB)) == before


# ── populate ───────────────────────────────────────────────────────────────────────────────────────


def resident_kib(name: str) -> int:
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if f"memfd:{name} " in line:
                return next(int(field.split()[1]) for field in lines if field.startswith("Rss:"))
    return 0


def test_populate_maps_exactly_the_pages_of_the_range() -> None:
    owner = owned(64 * PAGE, "populated")
    assert resident_kib("populated") == 0
    owner.populate(PAGE + 10, 2 * PAGE)
    assert resident_kib("populated") == 3 * PAGE // 1024
    owner.populate(0, 64 * PAGE)
    assert resident_kib("populated") == 64 * PAGE // 1024
    assert bytes(owner.view(0, 64 * PAGE)) == bytes(64 * PAGE)


def test_populate_of_a_reader_copies_nothing() -> None:
    owner = owned(64 * PAGE)
    owner.view(0, 1)[:] = b"a"
    reader = attached(owner)
    reader.populate(0, 64 * PAGE)
    owner.view(0, 1)[:] = b"b"
    assert bytes(reader.view(0, 1)) == b"b"


def test_populate_lets_other_threads_run() -> None:
    def fresh() -> None:
        region = owned(8 * MIB)
        region.populate(0, 8 * MIB)

    assert lets_others_run(fresh)


def test_threads_that_write_their_own_ranges_do_not_disturb_each_other() -> None:
    owner = owned(8 * MIB)
    edges = list(range(0, 8 * MIB + 1, 8 * MIB // 16))
    contents = [os.urandom(end - begin) for begin, end in pairwise(edges)]

    def write(begin: int, content: bytes) -> Callable[[], None]:
        def repeatedly() -> None:
            for _ in range(5):
                owner.view(begin, len(content))[:] = content

        return repeatedly

    threads = [threading.Thread(target=write(*pair)) for pair in zip(edges, contents, strict=False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert bytes(owner.view(0, 8 * MIB)) == b"".join(contents)
