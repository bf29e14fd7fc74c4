"""Table of attempts to get out of a worker, tried by one function with each isolation.

Each attempt says what happened: "refused", or what it got. So a driver's tests are one parametrised test, and a new
driver is held to the same table.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from tests.e2e.systems import System, error_in
from tests.servers import free_port

HANDLER = '''
import ctypes, os, resource, socket, stat, subprocess, sys
from fleetstart.runtime import Scale, function

libc = ctypes.CDLL(None, use_errno=True)
listening = []


def call(number, *arguments):
    """A system call by its number on x86-64."""
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def writes(*paths):
    done = []
    for path in paths:
        try:
            with open(path, "w") as file:
                file.write("1")
            done.append(path)
        except OSError:
            continue
    return done


def reads(*paths):
    done = []
    for path in paths:
        try:
            done += os.listdir(path) if os.path.isdir(path) else [open(path, "rb").read(64)]
        except OSError:
            continue
    return done


def connects(where):
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    with socket.socket(family) as sock:
        sock.settimeout(2)
        sock.connect(where)


def others():
    return [name for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (1, os.getpid())]


def environments():
    found = [open(f"/proc/{name}/environ", "rb").read() for name in os.listdir("/proc") if name.isdecimal()]
    return [text for text in found if b"FS_" in text]


def groups():
    found = []
    for folder, _, files in os.walk("/sys/fs/cgroup"):
        found += writes(*(os.path.join(folder, name) for name in files if name in ("cgroup.procs", "release_agent")))
    return found


def device(kind, major, minor):
    os.mknod("/tmp/device", kind | 0o600, os.makedev(major, minor))
    return open("/tmp/device", "rb").read(16)


def sparse(size):
    try:
        with open("/tmp/sparse", "wb") as file:
            file.truncate(size)
    finally:
        os.unlink("/tmp/sparse")


def node():
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP):
        pass


def listens(port):
    listening.append(socket.create_server(("0.0.0.0", port)))


def attempts(home, sockets, port):
    return {
        "write outside its folders": lambda: writes("/x", "/usr/x", "/etc/x", "/root/x", "/opt/x", "/lib/x", "/bin/sh"),
        "write its own Python": lambda: writes(os.__file__, os.path.dirname(os.__file__) + "/x.pth"),
        "read the node's state": lambda: reads(home, home + "/node", home + "/master.key", home + "/key"),
        "read another's code": lambda: reads(home + "/node/bundles"),
        "read another's segment": lambda: [name for name in reads("/dev/shm") if "fleetstart" in str(name)],
        "read another's environment": environments,
        "see another's processes": others,
        "read the node's accounts": lambda: reads("/etc/shadow", "/root/.ssh", "/home", "/var/lib"),
        "reach Redis": lambda: connects(sockets[0]),
        "reach the engine": lambda: connects(sockets[1]),
        "reach the node's interface": lambda: connects(("127.0.0.1", port)),
        "reach the network": lambda: connects(("192.0.2.1", 80)),
        "open a raw socket": node,
        "trace a process": lambda: call(101, 16, os.getppid() or 1, 0, 0),
        "mount": lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, None),
        "mount the host's disk": lambda: call(165, b"/dev/vda", b"/tmp", b"ext4", 0, None),
        "make namespaces": lambda: call(272, 0x00020000),
        "make a user namespace": lambda: call(272, 0x10000000),
        "change its root": lambda: os.chroot("/tmp"),
        "make a block device": lambda: device(stat.S_IFBLK, 254, 0),
        "make the device of memory": lambda: device(stat.S_IFCHR, 1, 1),
        "load a program into the kernel": lambda: call(321, 0, None, 0),
        "load a module": lambda: call(175, None, 0, b""),
        "reboot": lambda: call(169, 0xFEE1DEAD, 672274793, 0x01234567, None),
        "set the clock": lambda: call(227, 0, b"\\0" * 16),
        "name the host": lambda: call(170, b"mine", 4),
        "write the kernel's settings": lambda: writes("/proc/sys/kernel/hostname", "/proc/sysrq-trigger"),
        "change its control groups": groups,
        "raise its limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)),
        "make a file larger than its memory": lambda: sparse(65 << 20),
        "take capabilities": lambda: call(126, (ctypes.c_uint32 * 2)(0x20080522, 0), b"\\x00\\x00\\x20\\x00" * 6),
    }


@function(isolation="ISOLATION", memory="64MiB", concurrency=1, timeout_s=60, scale=Scale(max=1, keep_alive_s=600))
def escapes(home: str = "", sockets: list = [], port: int = 0, bomb: str = "", listen: int = 0, service: int = 0):
    if bomb:
        return globals()[bomb]()
    if listen:
        listens(listen)
        return {}
    if service:
        return connects_by_its_listener(service)
    said = {}
    for name, attempt in attempts(home, sockets, port).items():
        try:
            got = attempt()
            said[name] = f"got {got}" if got or got is None else "refused"
        except (OSError, ValueError):  # the latter from setrlimit
            said[name] = "refused"
    return said


def connects_by_its_listener(port):
    """By the socket that its node listens with for it, which is in the node's network, made an unconnected
    one: the worker hears of no more calls."""
    for number in range(3, 256):
        try:
            sock = socket.socket(fileno=os.dup(number))
            if sock.family != socket.AF_INET or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
        except OSError:
            continue
        sock.shutdown(socket.SHUT_RD)
        sock.settimeout(2)
        sock.connect(("127.0.0.1", port))


def forks():
    """Until the kernel refuses; its children end with it."""
    children = []
    try:
        while True:
            child = os.fork()
            if child == 0:
                import signal
                signal.pause()
            children.append(child)
            if len(children) > 2000:
                return "not stopped"
    except OSError:
        return "stopped"
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)


def balloons():
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1 << 20)))


def fills():
    try:
        with open("/tmp/big", "wb") as big:
            for _ in range(1 << 12):
                big.write(bytes(1 << 20))
        return "not stopped"
    except OSError as error:
        return "stopped"
    finally:
        os.unlink("/tmp/big")


def names():
    os.mkdir("/tmp/names")
    try:
        for number in range(200_000):
            os.close(os.open(f"/tmp/names/{number}", os.O_CREAT | os.O_WRONLY))
        return "not stopped"
    except OSError:
        return "stopped"
    finally:
        subprocess.run(["rm", "-rf", "/tmp/names"])
'''
ATTEMPTS = [line.split('"')[1] for line in HANDLER.splitlines() if line.startswith('        "') and '": ' in line]
BOMBS = {
    "forks": ("stopped", "out_of_memory"),  # page tables of processes are memory, too
    "balloons": ("out_of_memory",),
    "fills": ("stopped",),
    "names": ("stopped",),
}
"""What stops each: the kernel's refusal, or the end of its worker."""


def deploy_escapes(system: System, isolation: str) -> str:
    """Deploys the function that tries all, returns its name."""
    name = f"escapes-{isolation}"
    system.deploy(HANDLER.replace("ISOLATION", isolation), name=name)
    return name


def try_escapes(system: System, name: str, sockets: Iterable[str] = ()) -> dict[str, Any]:
    """What came of each attempt of ATTEMPTS. `sockets`: those of the node beside that of Redis."""
    paths = [str(system.home / "run" / "redis.sock"), *sockets, "/var/run/docker.sock"]
    body = {"home": str(system.home), "sockets": paths, "port": int(system.url.rpartition(":")[2])}
    return dict(system.ok(name, body, timeout_s=60))


def defused(system: System, name: str, bomb: str) -> str:
    """How a bomb of BOMBS was stopped: by the kernel's refusal, or by the end of its worker."""
    response = system.call(name, {"bomb": bomb}, timeout_s=60)
    return str(response.json()) if response.status_code == 200 else error_in(response).code


def reaches_the_node(system: System, isolation: str) -> bool:
    """True if a function can connect to the node's loopback by the socket that its node listens with for it. It is one
    of its own, as its worker may end of the attempt; otherwise it is busy with a socket that it cannot accept from."""
    name = f"reaches-{isolation}"
    system.deploy(HANDLER.replace("ISOLATION", isolation), name=name)
    with socket.create_server(("127.0.0.1", 0)) as service:
        system.call(name, {"service": service.getsockname()[1]}, timeout_s=60)
        system.fs("rm", name, "--yes")
        service.settimeout(0.2)
        try:
            service.accept()[0].close()
        except TimeoutError:
            return False
        return True


def heard_outside(system: System, name: str) -> bool:
    """True if a port on which a function listens is open on the machine."""
    port = free_port()
    system.ok(name, {"listen": port})
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True
