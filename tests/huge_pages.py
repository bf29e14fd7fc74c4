"""Huge pages for a test or a benchmark: reserved ones, which share one number of the machine with others that do the
same, and memory in pieces large enough for those on demand.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COUNT = Path("/proc/sys/vm/nr_hugepages")
COMPACT = Path("/proc/sys/vm/compact_memory")
FREE_PIECES = Path("/proc/buddyinfo")
HUGE_ORDER = 9
"""A piece of 2 MiB is 2^9 pages of 4 KiB."""


@contextmanager
def reserved(pages: int) -> Iterator[bool]:
    """Reserves so many more pages of 2 MiB. False if we may not, or memory is too much in pieces for them."""
    try:
        added = _change(pages)
    except OSError:
        yield False
        return
    try:
        yield added == pages
    finally:
        _change(-added)


def _change(pages: int) -> int:
    """Changes the machine's number; returns by how much it really changed."""
    with COUNT.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = int(file.read())
        COUNT.write_text(str(max(0, before + pages)))
        return int(COUNT.read_text()) - before


def make_room(pages: int) -> None:
    """Asks the kernel to move memory together if fewer pieces than these are free: after hours of other work it has
    none, and gives small pages instead. Does nothing where we may not."""
    free = 0
    for zone in FREE_PIECES.read_text().splitlines():
        counts = [int(word) for word in zone.split("zone")[1].split()[1:]]
        free += sum(count << order for order, count in enumerate(counts[HUGE_ORDER:]))
    if free < pages:
        with contextlib.suppress(OSError):
            COMPACT.write_text("1")
