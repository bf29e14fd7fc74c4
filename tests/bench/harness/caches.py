"""Page cache and huge pages: evicts files from the one and proves it, reserves some of the others and returns them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
TRIES = 50
"""A page that is on its way through a socket cannot go; one a second try finds free."""
FRESH_BYTES = 256 << 20
WARM_PIECE = 8 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def chill(paths: Sequence[Path]) -> None:
    """Out of the page cache, every page. RuntimeError if some stay: then a time would not be that of the disk."""
    for path in paths:
        left = 0
        for _ in range(TRIES):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            left = resident_bytes(path)
            if not left:
                break
            time.sleep(0.1)
        if left:
            raise RuntimeError(f"{path.name}: {left:,} bytes stay in the page cache")


def warm(paths: Sequence[Path]) -> None:
    """Reads the whole file into the page cache."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(WARM_PIECE):
                pass


def resident_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache, by mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {path.name}")
    try:
        pages = np.zeros(-(-size // PAGE), np.uint8)
        if _libc.mincore(address, size, pages.ctypes.data):
            raise OSError(ctypes.get_errno(), f"mincore of {path.name}")
        return int((pages & 1).sum()) * PAGE
    finally:
        _libc.munmap(address, size)


def disk_folder() -> Path:
    """Folder for temporary files on a disk that can be read past the page cache, not in memory."""
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=parent) as file:
            if _kind_of(parent) in ("tmpfs", "ramfs"):
                continue
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
            return parent
    raise RuntimeError("no folder for temporary files is on a disk that takes O_DIRECT: set TMPDIR")


@contextlib.contextmanager
def prefaulted(size_bytes: int) -> Iterator[memoryview]:
    """Memory of this process, in huge pages where madvise may ask for them, every page touched."""
    whole = -(-size_bytes // HUGE_PAGE) * HUGE_PAGE
    with mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(memory) as view, view[:size_bytes] as part:
            np.frombuffer(part, np.uint8)[::PAGE] = 0
            yield part


def fresh_memory_bytes_per_s() -> float:
    """Rate at which this machine gives memory that was never used: slow where its host must find it first."""
    with contextlib.closing(mmap.mmap(-1, FRESH_BYTES)) as memory:
        view = np.frombuffer(memory, np.uint8)
        began_s = time.perf_counter()
        view[::PAGE] = 1
        took_s = time.perf_counter() - began_s
        del view
    return FRESH_BYTES / took_s


def _kind_of(folder: Path) -> str:
    """The filesystem's name, by the longest mount point that holds the folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    whole = folder.resolve()
    holding = [(len(point), kind) for point, kind in mounts if whole.is_relative_to(point)]
    return max(holding)[1]
