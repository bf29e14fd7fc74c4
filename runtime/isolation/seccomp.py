"""Seccomp filter of a worker: the system calls that a function may not use.

A short deny list, not an allow list: user code is any Python with any wheel, and a list of what wheels
need would break some of them at each release. Denied is what changes the machine, looks into other
processes, makes namespaces (and with them capabilities), or has been the way out of containers. They
answer EPERM; `clone3` answers ENOSYS, because its flags lie in memory that a filter cannot read, and the
C library then uses `clone`, whose flags the filter checks.
"""

from __future__ import annotations

import errno
import platform
import struct

from . import linux

_DENIED = {
    "x86_64": {
        "acct": 163, "add_key": 248, "bpf": 321, "chroot": 161, "clock_adjtime": 305, "clock_settime": 227,
        "delete_module": 176, "finit_module": 313, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433,
        "init_module": 175, "io_uring_setup": 425, "ioperm": 173, "iopl": 172, "kcmp": 312, "kexec_file_load": 320,
        "kexec_load": 246, "keyctl": 250, "mount": 165, "mount_setattr": 442, "move_mount": 429,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "open_tree": 428, "perf_event_open": 298,
        "pidfd_getfd": 438, "pivot_root": 155, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101,
        "quotactl": 179, "reboot": 169, "request_key": 249, "setdomainname": 171, "sethostname": 170, "setns": 308,
        "settimeofday": 164, "swapoff": 168, "swapon": 167, "syslog": 103, "umount2": 166, "unshare": 272,
        "userfaultfd": 323,
    },
    "aarch64": {
        "acct": 89, "add_key": 217, "bpf": 280, "chroot": 51, "clock_adjtime": 266, "clock_settime": 112,
        "delete_module": 106, "finit_module": 273, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433,
        "init_module": 105, "io_uring_setup": 425, "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104,
        "keyctl": 219, "mount": 40, "mount_setattr": 442, "move_mount": 429, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "open_tree": 428, "perf_event_open": 241, "pidfd_getfd": 438, "pivot_root": 41,
        "process_vm_readv": 270, "process_vm_writev": 271, "ptrace": 117, "quotactl": 60, "reboot": 142,
        "request_key": 218, "setdomainname": 162, "sethostname": 161, "setns": 268, "settimeofday": 170,
        "swapoff": 225, "swapon": 224, "syslog": 116, "umount2": 39, "unshare": 97, "userfaultfd": 282,
    },
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000
_NAMESPACE_FLAGS = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT_0 = 0, 4, 16
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_KILL_PROCESS = 0x8000_0000


def supported(machine: str = platform.machine()) -> bool:
    return machine in _DENIED


def denied(machine: str = platform.machine()) -> dict[str, int]:
    """Name and number of each system call that is denied regardless of its arguments, for one architecture."""
    return dict(_DENIED[machine])


def program(machine: str, extra: tuple[int, ...] = ()) -> bytes:
    """Builds the filter as BPF for one architecture; `extra` numbers are denied, too."""
    numbers = sorted({*_DENIED[machine].values(), *extra})
    deny = struct.pack("=HBBI", _RETURN, 0, 0, _ERRNO | errno.EPERM)
    code = [
        struct.pack("=HBBI", _LOAD, 0, 0, _OFFSET_ARCH),
        # Calls by another architecture's numbers (32-bit int 0x80) have no business here.
        struct.pack("=HBBI", _JEQ, 1, 0, _AUDIT_ARCH[machine]),
        struct.pack("=HBBI", _RETURN, 0, 0, _KILL_PROCESS),
        struct.pack("=HBBI", _LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [struct.pack("=HBBI", _JGE, 0, 1, _X32_BIT), deny]
    code += [
        struct.pack("=HBBI", _JEQ, 0, 1, _CLONE3),
        struct.pack("=HBBI", _RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in numbers:
        code += [struct.pack("=HBBI", _JEQ, 0, 1, number), deny]
    code += [
        struct.pack("=HBBI", _JEQ, 0, 3, _CLONE[machine]),
        struct.pack("=HBBI", _LOAD, 0, 0, _OFFSET_ARGUMENT_0),
        struct.pack("=HBBI", _JSET, 0, 1, _NAMESPACE_FLAGS),
        deny,
        struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(code)


def install(extra: tuple[int, ...] = ()) -> None:
    """Installs the filter in this thread and all that it starts, irrevocably. Needs no_new_privs or CAP_SYS_ADMIN."""
    linux.set_seccomp_filter(program(platform.machine(), extra))
