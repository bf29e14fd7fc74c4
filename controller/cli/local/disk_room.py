"""Room on the disk of FS_HOME: named in the error of a start that failed, whose logs a full disk has not taken."""

from __future__ import annotations

import os
from pathlib import Path

from fleetstart.runtime.contract.sizes import MIB

from ..output import format_size

START_BYTES = 16 * MIB
"""Room for a start: its files have less than a MiB, Redis' and the journal's grow with the first calls."""


def lack_of_room(folder: Path) -> str:
    """What the disk of a folder lacks for a start; "" if nothing."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < START_BYTES:
        sizes = f"{format_size(free_bytes)} of {format_size(disk.f_blocks * disk.f_frsize)}"
        return f"the disk of {folder} has {sizes} free, and a start takes up to {format_size(START_BYTES)}"
    if disk.f_files and not disk.f_favail:  # some file systems count no files
        return f"the disk of {folder} has room for no more files: all {disk.f_files:,} are taken"
    return ""
