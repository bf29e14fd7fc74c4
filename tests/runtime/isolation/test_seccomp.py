"""The filter of system calls: its program is run on every call by an interpreter, and real workers try the calls."""

from __future__ import annotations

import errno
import platform
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.isolation import seccomp
from fleetstart.runtime.isolation.system_calls import SYSTEM_CALLS
from tests.runtime.workers import Functions

MACHINES = ("x86_64", "aarch64")
ALLOW, KILL, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
INT = st.integers(0, (1 << 32) - 1)


def answer(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """What the kernel's interpreter of BPF would return for a call."""
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number, ARCH[machine], 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                value &= operand
            case 0x05:
                at += operand
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
                at += if_true if holds else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"no such operation: {operation:#x}")


def verdict(machine: str, name: str, *arguments: int, local_sockets: bool = True) -> str:
    """ "allow", the name of the error, or "skip" if it answers that it is done, and is not."""
    program = seccomp.program(machine, local_sockets=local_sockets)
    found = answer(program, machine, SYSTEM_CALLS[machine][name], *arguments)
    return {ALLOW: "allow", ERRNO: "skip"}.get(found) or errno.errorcode[found - ERRNO]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_is_answered_as_the_list_says_and_unknown_ones_do_not_exist(machine: str) -> None:
    program = seccomp.program(machine)
    assert len(program) // 8 < 4096
    numbers = SYSTEM_CALLS[machine]
    expected = seccomp.verdicts(machine)
    for name, number in numbers.items():
        if name in expected:
            assert answer(program, machine, number) == (ERRNO | expected[name] if expected[name] else ALLOW), name
    for number in {*range(1000), 5000, 0x3FFF_FFFF} - set(numbers.values()):
        assert answer(program, machine, number) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_list_names_no_call_that_there_is_not(machine: str) -> None:
    known = {name for numbers in SYSTEM_CALLS.values() for name in numbers}
    assert known >= seccomp.ALLOWED | seccomp.ABSENT
    assert not seccomp.ALLOWED & seccomp.ABSENT
    checked = set(seccomp.CHECKED.split())
    assert checked == set(seccomp.checks(local_sockets=True)) <= set(SYSTEM_CALLS[machine])
    assert not checked & (seccomp.ALLOWED | seccomp.ABSENT)


@pytest.mark.parametrize("machine", MACHINES)
def test_event_loops_find_no_ring_before_the_filter(machine: str) -> None:
    program = seccomp.rings_program(machine)
    for name, number in SYSTEM_CALLS[machine].items():
        expected = ERRNO | errno.ENOSYS if name.startswith("io_uring") else ALLOW
        assert answer(program, machine, number) == expected


def test_calls_by_another_architectures_numbers_end_the_process() -> None:
    program = seccomp.program("x86_64")
    ARCH["i386"] = 0x4000_0003
    assert answer(program, "i386", 11) == KILL
    assert answer(program, "x86_64", 0x4000_0000 | 1) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
@given(domain=INT, kind=INT, protocol=INT)
def test_sockets_are_of_the_internet_local_or_for_reading_routes(
    machine: str, domain: int, kind: int, protocol: int
) -> None:
    found = verdict(machine, "socket", domain, kind, protocol)
    internet = domain in (2, 10) and kind & 15 in (1, 2) and protocol in (0, 1, 6, 17, 58)
    assert (found == "allow") == (internet or domain == 1 or (domain == 16 and protocol == 0))


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("socket", (2, 1 | 0x80800, 6), "allow"),
        ("socket", (10, 2, 17), "allow"),
        ("socket", (2, 3, 1), "EPERM"),
        ("socket", (2, 1, 132), "EPROTONOSUPPORT"),
        ("socket", (16, 3, 15), "EPROTONOSUPPORT"),
        ("socket", (17, 3, 0), "EAFNOSUPPORT"),
        ("socket", (38, 5, 0), "EAFNOSUPPORT"),
        ("socket", (40, 1, 0), "EAFNOSUPPORT"),
        ("socketpair", (1, 1, 0), "allow"),
        ("socketpair", (30, 1, 0), "ENOTSUP"),
        ("clone", (0x11,), "allow"),
        ("clone", (0x1000_0011,), "EPERM"),
        ("clone", (0x003D_0F00,), "allow"),
        ("ioctl", (0, 0x5412), "EPERM"),
        ("ioctl", (0, 0x5401), "allow"),
        ("setsockopt", (3, 1, 60), "EPERM"),
        ("setsockopt", (3, 1, 2), "allow"),
        ("setsockopt", (3, 6, 31), "EPERM"),
        ("setsockopt", (3, 6, 60), "allow"),
        ("personality", (0xFFFF_FFFF,), "allow"),
        ("personality", (0x0004_0000,), "EPERM"),
        ("prctl", (1, 9), "allow"),
        ("prctl", (1, 0), "skip"),
        ("prctl", (1 | 1 << 32, 0), "skip"),
        ("prctl", (1, 2), "skip"),
        ("prctl", (2, 0), "allow"),
        ("prctl", (15, 0), "allow"),
    ],
)
def test_some_calls_are_allowed_for_some_arguments(name: str, arguments: tuple[int, ...], expected: str) -> None:
    for machine in MACHINES:
        assert verdict(machine, name, *arguments) == expected


def test_local_sockets_can_be_left_out() -> None:
    assert verdict("x86_64", "socket", 1, 1, 0, local_sockets=False) == "EPERM"
    assert verdict("x86_64", "socketpair", 1, 1, 0, local_sockets=False) == "allow"


# ── from inside a worker ───────────────────────────────────────────────────────────────────────────

needs_filter = pytest.mark.skipif(not seccomp.supported(), reason="no call numbers for this architecture")


@needs_filter
def test_calls_that_are_not_listed_are_refused(functions: Functions) -> None:
    worker = functions.ready(
        """
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        def f(numbers: dict[str, int]):
            return {name: call(number) for name, number in numbers.items()}
        def call(number):
            result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
            return errno.errorcode.get(ctypes.get_errno(), "done") if result < 0 else "done"
        """
    )
    machine = platform.machine()
    refused = {name: code for name, code in seccomp.verdicts(machine).items() if code}
    assert {"ptrace", "mount", "bpf", "userfaultfd", "io_uring_setup", "vmsplice", "keyctl"} <= set(refused)
    said = worker.post({name: SYSTEM_CALLS[machine][name] for name in refused}).json()
    assert said == {name: errno.errorcode[code] for name, code in refused.items()}


@needs_filter
@pytest.mark.usefixtures("needs_namespaces")
def test_sockets_of_the_hypervisor_of_the_kernels_ciphers_and_of_raw_packets_cannot_be_opened(
    functions: Functions,
) -> None:
    worker = functions.ready(
        """
        import errno, socket
        def f():
            wanted = {"vsock": (40, 1, 0), "alg": (38, 5, 0), "packet": (17, 3, 0), "raw": (2, 3, 1),
                "audit": (16, 3, 9), "route": (16, 3, 0), "tcp": (2, 1, 0), "udp6": (10, 2, 0), "local": (1, 1, 0),
                "sctp": (2, 1, 132)}
            return {name: tried(*arguments) for name, arguments in wanted.items()}
        def tried(*arguments):
            try:
                socket.socket(*arguments).close()
                return "opened"
            except OSError as error:
                return errno.errorcode[error.errno]
        """
    )
    assert worker.post().json() == {
        **dict.fromkeys(("vsock", "alg", "packet"), "EAFNOSUPPORT"),
        **dict.fromkeys(("audit", "sctp"), "EPROTONOSUPPORT"),
        "raw": "EPERM",
        **dict.fromkeys(("route", "tcp", "udp6", "local"), "opened"),
    }


@pytest.mark.usefixtures("needs_namespaces")
def test_no_descriptor_from_before_the_filter_leads_around_it(functions: Functions) -> None:
    """A ring of io_uring takes calls that no filter sees; the event loop made one before it was confined."""
    worker = functions.ready(
        """
        import os
        def f():
            return [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) < 64
                and os.path.islink(f"/proc/self/fd/{fd}")]
        """
    )
    found = worker.post().json()
    assert len(found) > 4
    assert not [link for link in found if "io_uring" in link]


@needs_filter
@pytest.mark.usefixtures("needs_namespaces")
def test_pages_cannot_be_kept_in_a_pipe_or_a_socket(functions: Functions) -> None:
    """Nor with a worker on the node's network be handed over: the pages of weights have another user afterwards."""
    worker = functions.ready(
        """
        import ctypes, errno, os, socket, tempfile
        libc = ctypes.CDLL(None, use_errno=True)

        def tried(action):
            try:
                action()
                return "done"
            except OSError as error:
                return errno.errorcode[error.errno]

        def f(name: str):
            file = tempfile.TemporaryFile()
            file.write(b"weights")
            file.flush()
            read_end, write_end = os.pipe()
            pair = socket.socketpair()
            def connect():
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(name)
            return {
                "splice": tried(lambda: os.splice(file.fileno(), write_end, 7, offset_src=0)),
                "sendfile": tried(lambda: os.sendfile(pair[0].fileno(), file.fileno(), 0, 7)),
                "zerocopy": tried(lambda: socket.socket().setsockopt(socket.SOL_SOCKET, 60, 1)),
                "abstract": tried(connect),
            }
        """,
        network=True,
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0fleetstart-test-of-abstract-sockets")
        listener.listen()
        said = worker.post({"name": "\0fleetstart-test-of-abstract-sockets"}).json()
    assert said == {"splice": "ENOSYS", "sendfile": "ENOSYS", "zerocopy": "EPERM", "abstract": "EPERM"}


ORDINARY = """
import asyncio, concurrent.futures, ctypes, errno, fcntl, mmap, multiprocessing, os, select, shutil, signal
import socket, sqlite3, subprocess, sys, tempfile, threading, time
from multiprocessing import shared_memory

def f():
    return {name: action() for name, action in ACTIONS.items()}

def threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return sum(pool.map(int, "1234"))

def processes():
    out = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
    piped = subprocess.run("ls / | cat", shell=True, capture_output=True).stdout
    return int(out.stdout) + len(piped.split()[:1])

def forks():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2])

def managed():
    with multiprocessing.Manager() as manager:
        return manager.list([1, 2])[1]

def loop():
    async def main():
        child = await asyncio.create_subprocess_exec("true")
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            return [await child.wait(), await reader.read(), await asyncio.to_thread(lambda: 3)]
    return [str(part) for part in asyncio.run(main())]

def database():
    with sqlite3.connect("/tmp/a.db") as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table t (x)")
        db.execute("insert into t values (1)")
        return db.execute("select sum(x) from t").fetchone()[0]

def shared():
    block = shared_memory.SharedMemory(create=True, size=64)
    block.buf[0] = 7
    block.close()
    block.unlink()
    return 7

def memory():
    fd = os.memfd_create("x")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096) as mapped:
        mapped[:3] = b"abc"
        return mapped[:3].decode()

def events():
    fd = os.eventfd(1)
    poll = select.epoll()
    poll.register(fd, select.EPOLLIN)
    return [os.eventfd_read(fd), len(poll.poll(0))]

def signals():
    child = subprocess.Popen(["sleep", "1000"])
    child.terminate()
    return child.wait()

def copies():
    with open("/tmp/one", "w") as file:
        file.write("text")
    shutil.copyfile("/tmp/one", "/tmp/two")
    shutil.copytree("/tmp/function", "/tmp/copied")
    os.mkfifo("/tmp/fifo")
    os.chmod("/tmp/two", 0o600)
    os.link("/tmp/two", "/tmp/three")
    return open("/tmp/three").read()

def names():
    return [socket.getaddrinfo("localhost", 80)[0][4][0], [name for _, name in socket.if_nameindex()]]

ACTIONS = {action.__name__: action for action in (
    threads, processes, forks, managed, loop, database, shared, memory, events, signals, copies, names)}
"""


@pytest.mark.usefixtures("needs_namespaces")
def test_what_functions_do_is_allowed(functions: Functions) -> None:
    """Processes, threads, loops, files and memory, as the standard library and its kin use them."""
    worker = functions.ready(ORDINARY, memory_bytes=256 << 20)
    assert worker.post().json() == {
        "threads": 10,
        "processes": 43,
        "forks": [1, 2],
        "managed": 2,
        "loop": ["0", "b''", "3"],
        "database": 1,
        "shared": 7,
        "memory": "abc",
        "events": [1, 0],
        "signals": -15,
        "copies": "text",
        "names": ["127.0.0.1", ["lo"]],
    }
