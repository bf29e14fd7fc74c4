"""The check of trees on a node's disk after a boot: a machine that lost its power may not have written them whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fleetstart.runtime.contract.errors import LayerInvalid

BOOT = "boot"
"""File with the id of the machine's boot in which the tree was last known to be whole."""


def mark_whole(folder: Path) -> None:
    """Notes that the tree is whole in this boot. Errors: OSError."""
    (folder / BOOT).write_text(_boot_id())


def check_after_boot(folder: Path, files: Path, sizes: Iterable[tuple[str, int]]) -> None:
    """Compares the sizes of a tree's files with (path, bytes), once after each boot.

    `folder` has the mark, `files` the tree. Errors: LayerInvalid, OSError.
    """
    boot = _boot_id()
    if boot and (folder / BOOT).read_text() == boot:
        return
    for path, size_bytes in sizes:
        if (found := (files / path).stat().st_size) != size_bytes:
            raise LayerInvalid(f"{path} has {found} bytes, {size_bytes} expected")
    mark_whole(folder)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
