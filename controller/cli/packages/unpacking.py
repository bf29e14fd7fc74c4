"""Watch over what uv unpacks, which must stay within what a layer may have.

A wheel of a few megabytes can unpack to terabytes, or to millions of names, and uv has no limit. So while it runs, its
folders are looked at: the build's own, and the temporary ones in its cache, in which it unpacks first. Where another uv
uses that cache too, they are told from its own by the files that are open in them. Builds of source distributions run
code, which no watch of files can hold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetstart.runtime.contract.function.layer import FILES_MAX, LAYER_MAX_BYTES

LOOK_EVERY_S = 0.1
PAUSE_SHARE = 3
"""A look that took long is followed by a pause of so many times as long: looks are a fourth of the time at most."""
TEMPORARY = ".tmp"
_UNPACKED = (f"{TEMPORARY}*", f"*/{TEMPORARY}*", "archive-*/*")
"""Folders in uv's cache into which it unpacks, and where it moves them when they are whole."""


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits on what is unpacked: those of a layer."""

    size_bytes: int = LAYER_MAX_BYTES
    names: int = FILES_MAX
    """Most files, and most folders."""


def too_much(most: int, what: str) -> str:
    return f"the packages unpack to more than {most:,} {what}, which is all that a layer may have"


@dataclass(slots=True)
class _Counted:
    size_bytes: int = 0
    files: int = 0
    folders: int = 0

    def add(self, other: _Counted) -> None:
        self.size_bytes += other.size_bytes
        self.files += other.files
        self.folders += other.folders

    def excess(self, limits: UnpackLimits) -> str:
        """The reason for which it is too much, with the limit; empty if it is not."""
        for count, most, what in (
            (self.size_bytes, limits.size_bytes, "bytes"),
            (self.files, limits.names, "files"),
            (self.folders, limits.names, "folders"),
        ):
            if count > most:
                return too_much(most, what)
        return ""


@dataclass(slots=True)
class _Unpacked:
    """A folder that uv has unpacked something into."""

    folder: Path
    counted: _Counted
    is_whole: bool = False


class UnpackWatch:
    """Watch over one process of uv, in a thread. Ends the process once it has unpacked too much."""

    def __init__(self, work: Path, cache: Path, limits: UnpackLimits) -> None:
        """Notes the folders that there are: it is made before the process starts. `work` is the build's own folder,
        `cache` that of uv, which others may use."""
        self.excess = ""
        """The reason for which it was too much; empty while it is not."""
        self._pid = 0
        self._work = work
        self._cache = cache
        self._limits = limits
        self._before = set(self._folders())
        self._unpacked: dict[int, _Unpacked] = {}
        """Folders of this uv by inode: it moves them to their place when they are whole."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unpacking", daemon=True)

    def start(self, pid: int) -> None:
        self._pid = pid
        self._thread.start()

    def close(self) -> None:
        """Takes a last look, once uv has ended; removes what it unpacked if that was too much."""
        self._ended.set()
        self._thread.join()
        self.excess = self.excess or self._look([])
        if self.excess:
            for one in self._unpacked.values():
                shutil.rmtree(one.folder, ignore_errors=True)

    def _run(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            if excess := self._look(_with_descendants(self._pid)):
                self.excess = excess
                self._kill()
                return
            pause_s = max(LOOK_EVERY_S, PAUSE_SHARE * (time.monotonic() - began_s))

    def _look(self, processes: Sequence[int]) -> str:
        unpacked = _Counted()
        for inode, folder in self._own_folders(processes).items():
            one = self._unpacked.setdefault(inode, _Unpacked(folder, _Counted()))
            if not one.is_whole:
                one.folder, one.counted = folder, _count(folder, self._limits)
                one.is_whole = not folder.name.startswith(TEMPORARY)
        for one in self._unpacked.values():
            unpacked.add(one.counted)
        # What was unpacked is copied from the cache: the two are one layer twice.
        return unpacked.excess(self._limits) or _count(self._work, self._limits).excess(self._limits)

    def _folders(self) -> dict[int, Path]:
        """Folders in the cache into which wheels are unpacked, by inode."""
        found = {}
        for pattern in _UNPACKED:
            for path in self._cache.glob(pattern):
                with contextlib.suppress(OSError):
                    if path.is_dir():
                        found[path.stat().st_ino] = path
        return found

    def _own_folders(self, processes: Sequence[int]) -> dict[int, Path]:
        """New folders of these processes: those that are known, those in which they have files open, and all if no
        other process has the cache's lock open, as each uv has."""
        new = {inode: path for inode, path in self._folders().items() if inode not in self._before}
        opened = {path for process in processes for path in _open_files(process)} if new else set()
        own = {
            inode: folder
            for inode, folder in new.items()
            if inode in self._unpacked or any(path.startswith(f"{folder}/") for path in opened)
        }
        return own if len(own) == len(new) or self._is_shared(processes) else new

    def _is_shared(self, processes: Sequence[int]) -> bool:
        lock = str(self._cache / ".lock")
        others = (int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) not in processes)
        return any(lock in _open_files(process) for process in others)

    def _kill(self) -> None:
        """Stops uv first, so that it starts nothing and its open files show all that it unpacks to."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGSTOP)
            self._look(processes := _with_descendants(self._pid))
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _count(folder: Path, limits: UnpackLimits) -> _Counted:
    """Counts files, folders and bytes below a folder, which may change meanwhile. Stops where it is too much."""
    counted = _Counted()
    left = [str(folder)]
    while left and not counted.excess(limits):
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    counted.folders += 1
                    left.append(entry.path)
                    continue
                counted.files += 1
                with contextlib.suppress(OSError):
                    counted.size_bytes += entry.stat(follow_symlinks=False).st_size
                if counted.files > limits.names:
                    break
    return counted


def _open_files(process: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(entry.path)


def _with_descendants(process: int) -> list[int]:
    found = [process]
    for parent in found:  # grows while it is walked
        for listing in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.extend(int(child) for child in listing.read_text().split())
    return found
