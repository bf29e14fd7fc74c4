"""Private memory of processes, as /proc shows it: what a process and its descendants alone have.

That is anonymous memory, and shared memory that they can write. A segment of weights is mapped read-only, so it does
not count. Shared memory that no process has mapped, such as a memfd that is only written to, is not seen.
"""

from __future__ import annotations

import re
from pathlib import Path

_LEAST_BYTES = 1 << 20
"""Writable shared mappings that are smaller together are left out: each worker shares a page with its node, and to
look into mappings takes up to a millisecond for each hundred MiB."""
_MAPPINGS_MOST = 10_000
"""Mappings of any kind that are looked into, which takes 12 ms of processor time for each thousand. A process with
torch has some hundreds, and one may have 65,000: among so many the shared ones count with all that is in memory of
them, whoever else has it."""
_WRITABLE_SHARED = r"^([0-9a-f]+)-([0-9a-f]+) .w.s \S+ \S+ \d+ +(?:/dev/zero \(deleted\)|/memfd:|/SYSV|/dev/shm/).*$"
_MAPPING = re.compile(_WRITABLE_SHARED, re.MULTILINE)
_SHARE = re.compile(_WRITABLE_SHARED + r"(?:\n.*)*?\nPss: +(\d+) kB$", re.MULTILINE)


def private_bytes(pid: int) -> int:
    """Private memory of a process and its descendants; 0 if it is gone. Takes milliseconds, with thousands of mappings
    a tenth of a second: not for an event loop, but where the process is known."""
    return sum(_anonymous_bytes(process) + _shared_bytes(process) for process in _with_descendants(pid))


def _anonymous_bytes(process: Path) -> int:
    kib = _kib(_read(process / "smaps_rollup"))
    return 1024 * (min(kib.get("Private_Dirty:", 0), kib.get("Anonymous:", 0)) + kib.get("Swap:", 0))


def _shared_bytes(process: Path) -> int:
    """Its share of shared memory that it can write: of a page that n processes have mapped, an n-th."""
    maps = _read(process / "maps")
    mappings = _MAPPING.findall(maps)
    mapped_bytes = sum(int(end, 16) - int(begin, 16) for begin, end in mappings)
    if mapped_bytes < _LEAST_BYTES:
        return 0
    if maps.count("\n") > _MAPPINGS_MOST:
        return min(mapped_bytes, 1024 * _kib(_read(process / "status")).get("RssShmem:", 0))
    return 1024 * sum(int(kib) for _, _, kib in _SHARE.findall(_read(process / "smaps")))


def _kib(text: str) -> dict[str, int]:
    """The sizes in a file of /proc, by their names."""
    lines = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {words[0]: int(words[1]) for words in lines if len(words) == 3}


def _read(path: Path) -> str:
    """Empty if the process is gone. Names in it may be of any bytes."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _with_descendants(pid: int) -> list[Path]:
    """Their folders in /proc."""
    found = [Path(f"/proc/{pid}")]
    for process in found:  # grows while it is walked
        for listing in (process / "task").glob("*/children"):
            found.extend(Path(f"/proc/{child}") for child in _read(listing).split())
    return found
