"""Sizes of the memory file systems of a process in namespaces of its own: set from outside, at its assignment.

A container is made before it is known what it will run, so its /tmp and /dev/shm are given their size late. The mount
API of Linux 5.2 changes a file system by its path in /proc, without entering the namespace.
"""

from __future__ import annotations

import ctypes
import os

_SYS_FSCONFIG, _SYS_FSPICK = 431, 433
_AT_FDCWD = -100
_FSPICK_CLOEXEC = 1
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7
BYTES_PER_INODE = 4096
"""An empty file takes about a kilobyte of the kernel's memory: names cannot take more of it than bytes may."""
INODES_LEAST = 1024


def limit_tmpfs(pid: int, folder: str, size_bytes: int) -> None:
    """Bounds a tmpfs in the root of a process, in bytes and in inodes. Errors: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = f"/proc/{pid}/root{folder}"

    def called(*arguments: object) -> int:
        result = int(libc.syscall(*arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return result

    descriptor = called(_SYS_FSPICK, _AT_FDCWD, path.encode(), _FSPICK_CLOEXEC)
    try:
        for name, value in (("size", size_bytes), ("nr_inodes", max(INODES_LEAST, size_bytes // BYTES_PER_INODE))):
            called(_SYS_FSCONFIG, descriptor, _FSCONFIG_SET_STRING, name.encode(), str(value).encode(), 0)
        called(_SYS_FSCONFIG, descriptor, _FSCONFIG_CMD_RECONFIGURE, None, None, 0)
    finally:
        os.close(descriptor)
