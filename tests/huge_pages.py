"""Reserved huge pages for a test or a benchmark, which share one number of the machine with others that do the same."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COUNT = Path("/proc/sys/vm/nr_hugepages")


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
