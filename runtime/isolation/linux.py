"""Linux system calls that Python 3.11 lacks: namespaces, mounts, capabilities, death signals.

Every function is one system call (or one ioctl) and raises OSError that names it. What to call in which
order is decided in `root` and `namespaces`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
_CLONE_FLAGS = {name: flag for name, flag in globals().items() if name.startswith("CLONE_")}

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4

# These numbers are the same on every architecture that Linux numbers uniformly (5.2 and later).
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_CLOSE_RANGE = 436
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION = 1
_LANDLOCK_HAS_SCOPES = 6
"""Landlock's version that can confine abstract unix sockets."""
_LANDLOCK_SCOPE_ABSTRACT_SOCKETS = 1

_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_AT_EMPTY_PATH = 0x1000
_MNT_DETACH = 2
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x2008_0522
_CAPABILITIES_MAX = 64
_SECCOMP_MODE_FILTER = 2
_BPF_INSTRUCTION_BYTES = 8

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    names = "|".join(name for name, flag in _CLONE_FLAGS.items() if flags & flag)
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare({names})")


def setns(fd: int, flags: int) -> None:
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), f"setns({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _checked(result, f"mount {kind or source} on {target}")


def open_tree(path: str) -> int:
    """Opens a detached copy of the mounts at and below `path`; returns its descriptor."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _checked(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def move_mount(tree_fd: int, target: str) -> None:
    result = _libc.syscall(_SYS_MOVE_MOUNT, tree_fd, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _checked(result, f"move_mount to {target}")


def set_mount_attributes(tree: int | str, attributes: int, *, recursive: bool) -> None:
    """Adds attributes to a mount, by its path or the descriptor of a detached copy; `recursive`: and to those below."""
    change = _MountAttr(attributes, 0, 0, 0)
    descriptor, path = (_AT_FDCWD, tree.encode()) if isinstance(tree, str) else (tree, b"")
    flags = (_AT_RECURSIVE if recursive else 0) | (0 if path else _AT_EMPTY_PATH)
    size = ctypes.c_size_t(ctypes.sizeof(change))
    result = _libc.syscall(_SYS_MOUNT_SETATTR, descriptor, path, flags, ctypes.byref(change), size)
    _checked(result, f"mount_setattr {tree}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Makes a mount the root of this mount namespace, and the old root a mount below it."""
    number = _SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: its number is not known for {platform.machine()}")
    _checked(_libc.syscall(number, new_root.encode(), put_old.encode()), f"pivot_root to {new_root}")


def detach(path: str) -> None:
    """Unmounts what is at and below the path; files of it that are open stay open."""
    _checked(_libc.umount2(path.encode(), _MNT_DETACH), f"umount {path}")


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def close_from(first_fd: int) -> None:
    """Closes every descriptor from `first_fd` on, in one call (Linux 5.9; before it, one by one)."""
    if _libc.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first_fd), ctypes.c_uint(0xFFFF_FFFF), ctypes.c_uint(0)) < 0:
        os.closerange(first_fd, os.sysconf("SC_OPEN_MAX"))


def _prctl(option: int, argument: int, what: str) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), what)


def die_with_parent(signal_number: int) -> None:
    """Has the kernel send a signal when the parent dies. A change of credentials clears it: set it last."""
    _prctl(_PR_SET_PDEATHSIG, signal_number, "prctl(PR_SET_PDEATHSIG)")


def forbid_new_privileges() -> None:
    """Sets no_new_privs: exec grants no further rights. An unprivileged seccomp filter requires it."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")


def become_dumpable() -> None:
    """Lets a process that changed its user id read its own folder in /proc again, which is root's otherwise."""
    _prctl(_PR_SET_DUMPABLE, 1, "prctl(PR_SET_DUMPABLE)")


def empty_bounding_set() -> None:
    """Takes all capabilities from what this thread may execute. Does nothing without CAP_SETPCAP: then no_new_privs
    holds the line."""
    try:
        for capability in range(_CAPABILITIES_MAX):
            _prctl(_PR_CAPBSET_DROP, capability, "prctl(PR_CAPBSET_DROP)")
    except OSError:
        pass  # EINVAL past the kernel's last capability, EPERM without CAP_SETPCAP


def drop_capabilities() -> None:
    """Empties all five capability sets of this thread; a thread started later inherits that."""
    empty_bounding_set()
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, "prctl(PR_CAP_AMBIENT_CLEAR_ALL)")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, nothing), "capset")


def scope_abstract_sockets() -> bool:
    """Lets this process and its children connect to abstract unix sockets of their own alone, for good. False where the
    kernel cannot (before Linux 6.12, or without Landlock). Needs no_new_privs."""
    if _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION) < _LANDLOCK_HAS_SCOPES:
        return False
    ruleset = (ctypes.c_uint64 * 3)(0, 0, _LANDLOCK_SCOPE_ABSTRACT_SOCKETS)
    size = ctypes.c_size_t(ctypes.sizeof(ruleset))
    descriptor = _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    _checked(descriptor, "landlock_create_ruleset")
    try:
        _checked(_libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, descriptor, 0), "landlock_restrict_self")
    finally:
        os.close(descriptor)
    return True


def set_seccomp_filter(program: bytes) -> None:
    """Filters the system calls of this thread and of all that it starts, for good."""
    filter_program = _FilterProgram(len(program) // _BPF_INSTRUCTION_BYTES, program)
    zero = ctypes.c_ulong(0)
    pointer = ctypes.byref(filter_program)
    result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), pointer, zero, zero)
    _checked(result, "prctl(PR_SET_SECCOMP)")
