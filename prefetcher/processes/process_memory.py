"""Private memory of processes, as /proc shows it: what one process alone has, without what it shares."""

from __future__ import annotations

from pathlib import Path


def private_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Private memory of a process and its descendants; 0 if it is gone."""
    return sum(_of_one(process, proc) for process in _with_descendants(pid, proc))


def _of_one(pid: int, proc: Path) -> int:
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    kib = {words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) == 3}
    return 1024 * (min(kib.get("Private_Dirty:", 0), kib.get("Anonymous:", 0)) + kib.get("Swap:", 0))


def _with_descendants(pid: int, proc: Path) -> list[int]:
    found = [pid]
    for process in found:  # grows while it is walked
        for listing in (proc / str(process) / "task").glob("*/children"):
            try:
                found.extend(int(child) for child in listing.read_text().split())
            except OSError:
                continue
    return found
