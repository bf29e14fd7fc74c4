"""A check that a folder still has the files that were committed, without reading those that nobody used since.

The times of a write are not enough: they have ticks of milliseconds, and a write through a mapping may change none in a
tmpfs. So each file's time of the last access is set to zero before the commit reads it. Whoever maps it later changes
that time, and so does whoever reads it; the commit itself reads with O_NOATIME. A handler that maps files which it
opened with O_NOATIME is not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..contract.errors import FleetError
from ..contract.function.tree import list_files

TICKS_S = 0.02
"""Some ticks of the clock that gives files their times, which are 10 ms at most: a later write has another time."""
_SHARED = 3
"""Place of the letter `s` or `p` in the permissions of a line of /proc/PID/maps."""


class State(NamedTuple):
    """A file as lstat tells it. Of a folder only the type counts, as all that is in it is looked at, too."""

    mode: int
    inode: int = 0
    size_bytes: int = 0
    changed_ns: int = 0
    written_ns: int = 0
    accessed_ns: int = 0
    """Zero for links: following one is an access."""


@dataclass(frozen=True)
class Watched:
    """A folder before a commit read it."""

    names: frozenset[str]
    """Paths of all files and folders in it."""
    states: dict[str, State]
    """Those of which any later change shows in their state."""


@dataclass(frozen=True)
class Committed:
    """The files of a commit, and the folder as it was then."""

    files: dict[str, tuple[bool, bytes]]
    """By path: executable or not, and digest (blake2b) of what was sent."""
    watched: Watched


def open_unseen(path: str, flags: int) -> int:
    """An opener for `open()`: reading the file does not change the time of its last access, if it is our own.
    Errors: OSError."""
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def notes_mappings(folder: Path) -> bool:
    """Checks whether mapping a file changes the time of its last access there; False if there is no room to try. It
    does not in gVisor, nor where a file system is mounted with `noatime`."""
    try:
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            file.write(b"x")
            file.flush()
            os.utime(file.fileno(), ns=(0, 0))
            mmap.mmap(file.fileno(), 1).close()
            return os.fstat(file.fileno()).st_atime_ns != 0
    except OSError:
        return False


def watch(folder: Path, notes_mappings: Callable[[Path], bool] = notes_mappings) -> Watched:
    """The state of a folder whose files are listed and read afterwards. Takes `TICKS_S` and more. Errors: OSError."""
    if not notes_mappings(folder):
        return Watched(frozenset(_states(folder)), {})
    for path in _paths(folder):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and state.st_atime_ns:  # zero: a former commit set it; again would be a change
            with contextlib.suppress(PermissionError):  # somebody else's: its time stays, and it is read at the end
                os.utime(path, ns=(0, state.st_mtime_ns))
    try:
        mapped = _mapped_inodes()  # after the times were set: a mapping from now on changes one of them
    except OSError:  # no /proc
        return Watched(frozenset(_states(folder)), {})
    time.sleep(TICKS_S)
    found = _states(folder)
    return Watched(
        names=frozenset(found),
        states={path: state for path, state in found.items() if state.accessed_ns == 0 and state.inode not in mapped},
    )


def digest_of(path: Path, opener: Callable[[str, int], int] | None = None) -> bytes:
    """The blake2b of a file. Errors: OSError."""
    with open(path, "rb", opener=opener) as opened:
        return hashlib.file_digest(opened, "blake2b").digest()


def is_still(folder: Path, committed: Committed, digest: Callable[[Path], bytes] = digest_of) -> bool:
    """Checks whether the folder has the files and folders that it had at the commit, and no others. Files whose state
    does not tell are read."""
    try:
        states = _states(folder)
        if states.keys() != committed.watched.names:
            return False
        if states == committed.watched.states:
            return True
        files = list_files(folder, strict=True)
        if {file.path: file.executable for file in files} != {
            path: executable for path, (executable, _) in committed.files.items()
        }:
            return False
        return all(
            states[file.path] == committed.watched.states.get(file.path)
            or digest(folder / file.path) == committed.files[file.path][1]
            for file in files
        )
    except (FleetError, OSError):
        return False


def _paths(folder: Path) -> list[Path]:
    return [Path(parent, name) for parent, folders, names in os.walk(folder) for name in (*folders, *names)]


def _states(folder: Path) -> dict[str, State]:
    return {path.relative_to(folder).as_posix(): _state(path.lstat()) for path in _paths(folder)}


def _state(found: os.stat_result) -> State:
    if stat.S_ISDIR(found.st_mode):
        return State(stat.S_IFDIR)
    accessed_ns = 0 if stat.S_ISLNK(found.st_mode) else found.st_atime_ns
    return State(found.st_mode, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns, accessed_ns)


def _mapped_inodes() -> set[int]:
    """Inodes of files that some process has mapped and shares, so that it may write them. Processes of other users have
    no way into the folder, and are left out. Errors: OSError if not even this process' mappings can be read."""
    found = _inodes_of(Path("/proc/self/maps"))
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # another user's, or ended
                found |= _inodes_of(process / "maps")
    return found


def _inodes_of(maps: Path) -> set[int]:
    found: set[int] = set()
    for line in maps.read_bytes().split(b"\n"):
        match line.split(maxsplit=5):
            case [_, permissions, _, _, inode, *_] if permissions[_SHARED:] == b"s":
                found.add(int(inode))
    return found
