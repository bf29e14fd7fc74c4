"""Watches the files of a function for changes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ..handler.settings import FILE
from ..packages.requirements import FILES as REQUIREMENTS

FileStamps = dict[str, tuple[int, int]]
"""File name → (modification time in ns, size)."""

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})
FILES_MAX = 10_000


def file_stamps(folder: Path, also: Collection[str] = ()) -> FileStamps:
    """Stamps of the folder's Python files, `fs.toml` and requirements, and `also`: others of the last bundle."""
    found: FileStamps = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        for name in names:
            if (name.endswith(".py") and not name.startswith(".")) or (
                (name == FILE or name in REQUIREMENTS) and Path(parent) == folder
            ):
                _add(found, Path(parent, name))
        if len(found) > FILES_MAX:
            break
    for name in also:
        _add(found, folder / name)
    return found


def _add(found: FileStamps, path: Path) -> None:
    try:
        status = path.stat()
    except OSError:
        return  # an editor replaces files: between the two there is none
    found[str(path)] = (status.st_mtime_ns, status.st_size)


class ChangeDetector:
    """Detects each finished change once. Editors write in several steps, so a quiet look must follow a change."""

    def __init__(self, first: FileStamps) -> None:
        self._served = first
        self._last = first

    def changed(self, now: FileStamps) -> bool:
        """Checks whether to deploy again: something has changed, and nothing more since the last look."""
        settled, self._last = now == self._last, now
        if not settled or now == self._served:
            return False
        self._served = now
        return True
