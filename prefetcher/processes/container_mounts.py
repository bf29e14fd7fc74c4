"""Mounts of a container that runs already: sizes of its memory file systems, folders of the node. Set from outside.

A container is made before it is known what it will run, so at its assignment /tmp and /dev/shm are given their size,
and packages and volumes are mounted into it, read-only. Linux' mount API (5.2, openat2 5.6, mount_setattr 5.12) changes
a file system by a descriptor of its folder, which is looked up below the container's root; for a mount a thread of its
own enters the container's mount namespace, and ends there. No code of a function has run in the container by then, but
its files may be those of a user's image: no path of it is followed from the node's root.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSCONFIG, _SYS_FSPICK = 428, 429, 431, 433
_SYS_OPENAT2, _SYS_MOUNT_SETATTR = 437, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 1, 8
_RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x04, 0x10
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
BYTES_PER_INODE = 4096
"""An empty file takes about a kilobyte of the kernel's memory: names cannot take more of it than bytes may."""
INODES_LEAST = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def limit_tmpfs(pid: int, folder: str, size_bytes: int) -> None:
    """Bounds a tmpfs in the root of a process, in bytes and in inodes. Errors: OSError; ELOOP if a part of the path is
    a symbolic link, which may end at a mount that the container shares with the node."""
    place = _folder_of(pid, folder)
    try:
        descriptor = _call(folder, _SYS_FSPICK, place, b"", _FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH)
    finally:
        os.close(place)
    try:
        for name, value in (("size", size_bytes), ("nr_inodes", max(INODES_LEAST, size_bytes // BYTES_PER_INODE))):
            _call(folder, _SYS_FSCONFIG, descriptor, _FSCONFIG_SET_STRING, name.encode(), str(value).encode(), 0)
        _call(folder, _SYS_FSCONFIG, descriptor, _FSCONFIG_CMD_RECONFIGURE, None, None, 0)
    finally:
        os.close(descriptor)


def _folder_of(pid: int, folder: str) -> int:
    """Descriptor of a folder in the root of a process. Errors: OSError; ELOOP for a symbolic link on the way."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    root = os.open(f"/proc/{pid}/root", flags)
    try:
        how = (ctypes.c_uint64 * 3)(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_SYMLINKS)
        size = ctypes.c_size_t(ctypes.sizeof(how))
        return _call(folder, _SYS_OPENAT2, root, folder.encode(), ctypes.byref(how), size)
    finally:
        os.close(root)


def show_folders(pid: int, folders: Mapping[str, str]) -> None:
    """Mounts folders of the node into the mount namespace of a process, read-only: by path there, source here.
    Errors: OSError."""
    trees: dict[str, int] = {}
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for path, source in folders.items():
            trees[path] = _read_only_copy(source)
        failed: list[BaseException] = []
        thread = threading.Thread(target=_mount_inside, args=(namespace, trees, failed), name="container-mounts")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
    finally:
        for descriptor in (namespace, *trees.values()):
            os.close(descriptor)


def _mount_inside(namespace: int, trees: Mapping[str, int], failed: list[BaseException]) -> None:
    """Runs in a thread that ends after it: its root is the container's from here on."""
    try:
        _check(_libc.unshare(_CLONE_FS), "unshare")
        _check(_libc.setns(namespace, _CLONE_NEWNS), "setns")
        for path, tree in trees.items():
            os.makedirs(path, exist_ok=True)
            _call(path, _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    except BaseException as error:
        failed.append(error)


def _read_only_copy(source: str) -> int:
    """Descriptor of a detached copy of the mounts at and below a folder."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    tree = _call(source, _SYS_OPEN_TREE, _AT_FDCWD, source.encode(), flags)
    try:
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        _call(source, _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, ctypes.byref(attributes), size)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _call(path: str, *arguments: object) -> int:
    return _check(int(_libc.syscall(*arguments)), path)


def _check(result: int, path: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result
