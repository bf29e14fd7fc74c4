"""Memory limits without control groups: look a few times a second, end what is above.

Weaker than a group: an allocation is noticed up to `INTERVAL_S` late. What counts is memory that the
worker alone has (private and dirty): neither the segment nor what it shares with the fork server.
"""

from __future__ import annotations

from pathlib import Path

INTERVAL_S = 0.25
_COUNTED = ("Private_Dirty:", "Private_Hugetlb:", "Swap:")


def private_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Memory of the process and its descendants alone; 0 if it is gone."""
    return sum(_of_one(process, proc) for process in _with_descendants(pid, proc))


def _of_one(pid: int, proc: Path) -> int:
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines() if line.startswith(_COUNTED))
    return sum(int(words[1]) * 1024 for words in lines)


def _with_descendants(pid: int, proc: Path) -> list[int]:
    found = [pid]
    for process in found:  # grows while it is walked
        for listing in (proc / str(process) / "task").glob("*/children"):
            try:
                found.extend(int(child) for child in listing.read_text().split())
            except OSError:
                continue
    return found
