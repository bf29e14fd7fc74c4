"""Seccomp filter of a worker: the system calls that a function may use.

An allow list. User code is any Python with any wheel, so the list is wide: files, memory, processes, threads, signals,
timers, sockets, System V and POSIX IPC (in namespaces of the worker's own). It is held against what such code
calls (`tests/bench/system_calls.py`). Left out is what changes the machine, looks into other processes, makes
namespaces, or is a large and rarely needed part of the kernel.

A call that is left out answers EPERM. ENOSYS, "this kernel has none", is the answer where libraries then do the same in
another way: calls that are newer than the list, and those in `ABSENT`. Some calls are allowed for some arguments only
(`checks`).

Pages of weights are shared, and used again for other weights when no worker has them. `splice`, `vmsplice`, `tee`,
`sendfile` and MSG_ZEROCOPY would keep pages in a pipe or a socket beyond the end of the worker, so they are left out.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from . import linux
from .system_calls import SYSTEM_CALLS

FILES = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
    fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch
    inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr link linkat listxattr listxattrat llistxattr
    lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64 preadv preadv2
    pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr removexattrat rename renameat
    renameat2 rmdir setxattr setxattrat stat statfs statx symlink symlinkat sync_file_range syncfs truncate umask unlink
    unlinkat utime utimensat utimes write writev
"""
EVENTS = """
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pipe pipe2 poll ppoll
    pselect6 select signalfd signalfd4 timerfd_create timerfd_gettime timerfd_settime
"""
MEMORY = """
    brk cachestat get_mempolicy madvise map_shadow_stack mbind membarrier memfd_create mincore mlock mlock2 mlockall
    mmap mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_madvise
    set_mempolicy
"""
PROCESSES = """
    alarm arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv
    futex_wake get_robust_list getcpu getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid
    getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill
    landlock_add_rule landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prlimit64
    process_mrelease restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr
    sched_setparam sched_setscheduler sched_yield seccomp set_robust_list set_tid_address setfsgid setfsuid setgid
    setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack
    sysinfo tgkill times tkill uname vfork wait4 waitid
"""
CLOCKS = """
    clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time timer_create timer_delete timer_getoverrun
    timer_gettime timer_settime
"""
SOCKETS = """
    accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
    sendto shutdown
"""
IPC = """
    mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl semget
    semop semtimedop shmat shmctl shmdt shmget
"""
CHECKED = "clone ioctl personality prctl setsockopt socket socketpair"
RANDOM = "getrandom"
ALLOWED = frozenset(" ".join((FILES, EVENTS, MEMORY, PROCESSES, CLOCKS, SOCKETS, IPC, RANDOM)).split())
"""Calls that are allowed with any arguments."""
NOT_THERE = """
    clone3 io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit io_uring_enter io_uring_register
    io_uring_setup listmount memfd_secret sendfile splice statmount tee vmsplice
"""
ABSENT = frozenset(NOT_THERE.split())
"""Calls that answer ENOSYS. `clone3` because its flags lie in memory that a filter cannot read: the C library then uses
`clone`, whose flags the filter checks."""

_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000
_NAMESPACE_FLAGS = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
_TYPE_MASK = 0xF
_STREAM, _DATAGRAM, _RAW = 1, 2, 3
_PROTOCOLS = (0, 1, 6, 17, 58)
"""Of the internet: the type's own, ICMP (pings), TCP, UDP, ICMPv6. Others have the kernel load a module for them."""
_ROUTE = 0
"""NETLINK_ROUTE, from which the C library reads interfaces and addresses."""
_SET_DEATH_SIGNAL, _SIGKILL = 1, 9
"""PR_SET_PDEATHSIG, which a worker has so that it does not outlive its node, and the one signal that it may have."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SOL_SOCKET, _SOL_TCP = 1, 6
_SOCKET_OPTIONS = (26, 50, 51, 52, 60)
"""Options that attach programs to sockets (SO_ATTACH_FILTER and its kin), and SO_ZEROCOPY."""
_TCP_ULP = 31
_PERSONALITIES = (0, 8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
"""Linux, 32-bit addresses, and the question which it is: not the one without a random address layout."""

_LOAD, _JUMP, _JEQ, _JGE, _JSET, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_KILL_PROCESS = 0x8000_0000

UNDONE = -1
"""Answer of a call that says it is done, and is not."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def supported(machine: str = platform.machine()) -> bool:
    return machine in _AUDIT_ARCH


def verdicts(machine: str) -> dict[str, int]:
    """What each system call answers whatever its arguments: 0 if it is allowed, or an errno; those in CHECKED are left
    out."""
    return {
        name: 0 if name in ALLOWED else errno.ENOSYS if name in ABSENT else errno.EPERM
        for name in SYSTEM_CALLS[machine]
        if name not in CHECKED.split()
    }


# ── checks of arguments ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rule:
    """One step of a check: if the argument, masked, is one of the values (`op` "in") or shares a bit with one of them
    ("bits"), the call answers `then`: 0 if it is allowed, an errno, or UNDONE. Several conditions hold together."""

    conditions: tuple[tuple[int, Literal["in", "bits"], int, tuple[int, ...]], ...]
    """Argument, comparison, mask, values."""
    then: int


def _is(argument: int, *values: int, mask: int = 0xFFFF_FFFF) -> tuple[int, Literal["in"], int, tuple[int, ...]]:
    return argument, "in", mask, values


def checks(*, local_sockets: bool) -> dict[str, tuple[tuple[Rule, ...], int]]:
    """Rules by system call, of which the first that fits decides, and what the call answers otherwise."""
    internet = _is(0, AF_INET, AF_INET6)
    return {
        "clone": ((Rule(((0, "bits", 0xFFFF_FFFF, (_NAMESPACE_FLAGS,)),), errno.EPERM),), 0),
        "ioctl": ((Rule((_is(1, _TIOCSTI, _TIOCLINUX),), errno.EPERM),), 0),
        "personality": ((Rule((_is(0, *_PERSONALITIES),), 0),), errno.EPERM),
        "prctl": (
            (
                Rule((_is(0, _SET_DEATH_SIGNAL), _is(1, _SIGKILL)), 0),
                # torch.multiprocessing asks for another in each process that it spawns, and fails if it is refused.
                Rule((_is(0, _SET_DEATH_SIGNAL),), UNDONE),
            ),
            0,
        ),
        "setsockopt": (
            (
                Rule((_is(1, _SOL_SOCKET), _is(2, *_SOCKET_OPTIONS)), errno.EPERM),
                Rule((_is(1, _SOL_TCP), _is(2, _TCP_ULP)), errno.EPERM),
            ),
            0,
        ),
        "socket": (
            (
                Rule((_is(0, AF_UNIX),), 0 if local_sockets else errno.EPERM),
                Rule((internet, _is(1, _RAW, mask=_TYPE_MASK)), errno.EPERM),
                Rule((internet, _is(1, _STREAM, _DATAGRAM, mask=_TYPE_MASK), _is(2, *_PROTOCOLS)), 0),
                Rule((internet,), errno.EPROTONOSUPPORT),
                Rule((_is(0, AF_NETLINK), _is(2, _ROUTE)), 0),
                Rule((_is(0, AF_NETLINK),), errno.EPROTONOSUPPORT),
            ),
            errno.EAFNOSUPPORT,
        ),
        "socketpair": ((Rule((_is(0, AF_UNIX),), 0),), errno.EOPNOTSUPP),
    }


def _check(rules: Sequence[Rule], otherwise: int) -> list[Instruction]:
    code: list[Instruction] = []
    for rule in rules:
        code += _rule(rule)
    return [*code, _answer(otherwise)]


def _rule(rule: Rule) -> list[Instruction]:
    """Code that answers if all conditions hold, and goes on behind itself if one does not."""
    code = [_answer(rule.then)]
    for argument, op, mask, values in reversed(rule.conditions):
        jump = _JEQ if op == "in" else _JSET
        tests: list[Instruction] = []
        for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
            # The last value decides between what follows and the way behind the rule, the others may only agree.
            tests.append((jump, left, 0 if left else len(code), value))
        load: list[Instruction] = [(_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * argument)]
        if mask != 0xFFFF_FFFF:
            load.append((_AND, 0, 0, mask))
        code = [*load, *tests, *code]
    return code


# ── the program ────────────────────────────────────────────────────────────────────────────────────


def program(machine: str, extra: tuple[int, ...] = (), *, local_sockets: bool = True) -> bytes:
    """Builds the filter as BPF for one architecture; `extra` numbers are denied, too.

    `local_sockets`: whether AF_UNIX sockets can be made; connected pairs always can.
    """
    numbers = SYSTEM_CALLS[machine]
    by_number = {numbers[name]: [_answer(answer)] for name, answer in verdicts(machine).items()}
    for name, (rules, otherwise) in checks(local_sockets=local_sockets).items():
        by_number[numbers[name]] = _check(rules, otherwise)
    by_number |= {number: [_answer(errno.EPERM)] for number in extra}
    code: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        # Calls by another architecture's numbers (32-bit int 0x80) have no business here.
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, _X32_BIT), _answer(errno.EPERM)]
    code += _search(_runs(by_number))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def rings_program(machine: str) -> bytes:
    """A filter under which io_uring does not exist, and everything else does."""
    calls = [number for name, number in SYSTEM_CALLS[machine].items() if name.startswith("io_uring_")]
    code: list[Instruction] = [(_LOAD, 0, 0, _OFFSET_NUMBER)]
    for number in calls:
        code += [(_JEQ, 0, 1, number), _answer(errno.ENOSYS)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in (*code, _answer(0)))


def forbid_rings() -> None:
    """Has this process and its children do without io_uring, also before their own filter: a ring from then would lead
    around it. Event loops make one where they can."""
    linux.forbid_new_privileges()
    linux.set_seccomp_filter(rings_program(platform.machine()))


def _answer(answer: int) -> Instruction:
    if answer == UNDONE:
        return _RETURN, 0, 0, _ERRNO
    return _RETURN, 0, 0, _ERRNO | answer if answer else _ALLOW


def _runs(by_number: Mapping[int, list[Instruction]]) -> list[tuple[int, list[Instruction]]]:
    """First number and code of each run of numbers with the same code; numbers without code are unknown calls."""
    unknown = [_answer(errno.ENOSYS)]
    numbered = [(number, by_number.get(number, unknown)) for number in range(max(by_number) + 2)]
    return [next(iter(run)) for _, run in groupby(numbered, key=lambda pair: pair[1])]


def _search(runs: Sequence[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search for the run that holds the number: the filter runs at each system call."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    low, high = _search(runs[:middle]), _search(runs[middle:])
    if len(low) < 256:
        return [(_JGE, len(low), 0, runs[middle][0]), *low, *high]
    return [(_JGE, 0, 1, runs[middle][0]), (_JUMP, 0, 0, len(low)), *low, *high]


@functools.cache
def _own_program(local_sockets: bool) -> bytes:
    return program(platform.machine(), local_sockets=local_sockets)


def prepare() -> None:
    """Builds the filters, which takes a millisecond that no start shall pay."""
    for local_sockets in (True, False):
        _own_program(local_sockets)


def install(extra: tuple[int, ...] = (), *, local_sockets: bool = True) -> None:
    """Installs the filter in this thread and all that it starts, irrevocably. Needs no_new_privs or CAP_SYS_ADMIN."""
    made = program(platform.machine(), extra, local_sockets=local_sockets) if extra else _own_program(local_sockets)
    linux.set_seccomp_filter(made)
