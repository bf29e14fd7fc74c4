"""How a worker is shut in, in two steps, because pooled workers are forked before their function is known.

*At the fork* (`fork_into_namespaces`, `enter_namespaces`): a pid namespace in which the worker is process 1,
mount, ipc and uts namespaces, and, unless the function asked for the network, a net namespace with a
loopback of its own.

*At the assignment* (`confine`), before the first line of user code: the whole tree read-only; a fresh
/proc, /tmp and /dev/shm; /dev with the harmless devices alone; nothing in /run, in people's homes (but for
what Python runs from), and in the folders that the node hides (its state folder with Redis' socket, the
store and other functions' bundles); the function's bundle, read-only, at /tmp/function; then no
capabilities, no new privileges, a seccomp filter (`seccomp`) and resource limits.

The user id stays the daemon's. Python, its packages and GPU devices are often readable by their owner
alone (a venv below /root), and a shifted id would lose them. What that id still buys without
capabilities is reading: nothing can be written, but system files that the daemon's user may read, a
worker may read. An id-mapped mount would close that too, where Linux 5.19 and the file system take part.

Where the kernel refuses namespaces (a container engine's default profile, for one), a worker is a plain
process: it still loses its capabilities, gets no new privileges, the filter and the limits, and it says so.
An ordinary user gets the namespaces inside a user namespace.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import linux, seccomp

FUNCTION_DIR = "/tmp/function"
"""Where a confined worker finds its bundle: its working folder and the first entry of sys.path."""
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_PREFIXES = ("nvidia", "dri")
"""Beyond the harmless ones, what a GPU worker opens."""
HOMES = ("/root", "/home")
"""People's keys and tokens lie there. An ordinary daemon's own home is hidden wherever it is."""
OPEN_FILES_MAX = 4096
_MASK_OPTIONS = "size=64k,mode=755"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What this machine gives a worker: tried at the start of a fork server, not guessed."""

    namespaces: tuple[str, ...] = ()
    refused: str = ""
    """Why something is not given; empty if all is."""

    def describe(self, *, network: bool = False) -> str:
        """The namespaces of one worker, for example "mnt,pid,ipc,uts,net"; empty for a plain process."""
        return ",".join(name for name in self.namespaces if not (network and name == "net"))


ALL_NAMESPACES = ("mnt", "pid", "ipc", "uts", "net")


@dataclass(frozen=True, slots=True)
class MountStep:
    """`mask` puts an empty tmpfs over a folder; `keep` puts back what lay there before."""

    kind: Literal["mask", "keep"]
    path: str


def mount_steps(masks: Iterable[str], keeps: Iterable[str]) -> tuple[MountStep, ...]:
    """In which order to mask folders and to put kept ones back: from the root downwards, so that the nearest wins.

    Paths are absolute and normal. A kept path that no mask covers needs nothing; what is both is masked.
    """
    masked = set(masks)
    kept = {path for path in keeps if path not in masked and any(parent in masked for parent in _parents(path))}
    steps = [MountStep("mask", path) for path in masked] + [MountStep("keep", path) for path in kept]
    return tuple(sorted(steps, key=lambda step: (step.path.count("/"), step.path)))


def _parents(path: str) -> Iterable[str]:
    while (path := os.path.dirname(path)) != "/":
        yield path


def plan(hide: Iterable[str]) -> tuple[MountStep, ...]:
    """The steps of this machine. Made once by a fork server, for every worker that it forks."""
    devices = [f"/dev/{name}" for name in os.listdir("/dev") if name in DEVICES or name.startswith(DEVICE_PREFIXES)]
    keeps = [*interpreter_paths(), *devices, os.path.realpath("/etc/resolv.conf")]
    masks = ["/tmp", "/dev", "/run", *HOMES, *hide]
    with contextlib.suppress(KeyError):  # an id without a name has no home
        masks.append(pwd.getpwuid(os.getuid()).pw_dir)
    return mount_steps({path for path in map(os.path.realpath, masks) if path != "/"}, keeps)


def interpreter_paths() -> list[str]:
    """What this Python runs from: it must stay visible if it lies below a masked folder (a checkout in /tmp)."""
    package = Path(__file__).resolve().parents[1]
    native = importlib.util.find_spec("fleetstart.native")  # found, not imported: only some workers need it
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = {os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix, *libraries) if path}
    found.add(str(package))
    if native is not None and native.origin is not None:
        found.add(os.path.dirname(os.path.realpath(native.origin)))
    return sorted(path for path in found if os.path.isdir(path))


def fork_into_namespaces() -> int:
    """os.fork, with the child as process 1 of a new pid namespace and yet a direct child of the caller.

    The caller's *future children's* namespace is changed for the moment of the fork and set back, which
    spares the process in between that `unshare --fork` has.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        linux.unshare(linux.CLONE_NEWPID)
        try:
            pid = os.fork()
        except BaseException:
            linux.setns(own, linux.CLONE_NEWPID)
            raise
        if pid:
            linux.setns(own, linux.CLONE_NEWPID)
        return pid
    finally:
        os.close(own)


def enter_namespaces(*, network: bool) -> None:
    """In the new child: the other namespaces. With `network`, the node's network stays."""
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    linux.unshare(flags if network else flags | linux.CLONE_NEWNET)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    if not network:
        linux.loopback_up()


def confine(bundle_dir: str, steps: Iterable[MountStep], *, writable_bytes: int, terminals: bool = False) -> None:
    """The second step, in a worker that has its namespaces. Call it while the process has one thread.

    `writable_bytes` limits /tmp and /dev/shm together. Afterwards the working folder is FUNCTION_DIR. With `terminals`,
    pseudo-terminals can be had: of an instance of its own, in which there are no others.
    """
    if terminals:
        steps = (*steps, MountStep("keep", "/dev/tty"))
    trees = {step.path: linux.open_tree(step.path) for step in steps if step.kind == "keep" and _exists(step.path)}
    folders = {path: os.path.isdir(path) for path in trees}
    bundle = linux.open_tree(bundle_dir)

    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    for step in steps:
        if step.kind == "keep" and step.path in trees:
            _put_back(trees.pop(step.path), step.path, folder=folders[step.path])
        elif step.kind == "mask" and os.path.isdir(step.path):
            _mask(step.path, writable_bytes)
    _make_device_links()
    _put_back(bundle, FUNCTION_DIR, folder=True)
    os.mkdir("/dev/shm")
    if terminals:
        os.mkdir("/dev/pts")
        os.symlink("pts/ptmx", "/dev/ptmx")
    linux.set_read_only("/", True, recursive=True)
    linux.set_read_only("/tmp", False, recursive=False)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"size={writable_bytes // 2},mode=1777")
    if terminals:
        linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666")
    os.chdir(FUNCTION_DIR)


def _exists(path: str) -> bool:
    """Also of a device whose driver went away: then there is nothing to keep."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _mask(path: str, writable_bytes: int) -> None:
    flags = linux.MS_NOSUID | (0 if path == "/dev" else linux.MS_NODEV)
    options = f"size={writable_bytes // 2},mode=1777" if path == "/tmp" else _MASK_OPTIONS
    linux.mount("tmpfs", path, "tmpfs", flags, options)


def _put_back(tree_fd: int, path: str, *, folder: bool) -> None:
    if folder:
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    try:
        linux.move_mount(tree_fd, path)
    finally:
        os.close(tree_fd)


def _make_device_links() -> None:
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")


def give_up_rights() -> None:
    """No capabilities, no new privileges, the filter, the limits: for plain processes as well."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(OPEN_FILES_MAX, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    linux.drop_capabilities()
    linux.forbid_new_privileges()
    if seccomp.supported():
        seccomp.install()
    linux.die_with_parent(signal.SIGKILL)


def enter_user_namespace() -> None:
    """An ordinary user, as the same user, becomes the owner of a namespace and may then make the others in it."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def become_user_root() -> None:
    """The calling process goes on as process 1 of a pid namespace inside a user namespace; the caller waits for it.

    Two processes, because `fork_into_namespaces` must set its own pid namespace back, which the kernel
    allows only if that one belongs to the user namespace too. Either of the two ends with the other.
    """
    enter_user_namespace()
    linux.unshare(linux.CLONE_NEWPID)
    child = os.fork()
    if child:
        linux.close_from(3)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    linux.die_with_parent(signal.SIGKILL)


def probe() -> tuple[Isolation, bool]:
    """What workers can be given, tried for real in a child; and whether that takes `become_user_root` first."""
    unfiltered = "" if seccomp.supported() else "no seccomp filter: this architecture's call numbers are not known"
    refused = _refusal(_try_all)
    if not refused:
        return Isolation(namespaces=ALL_NAMESPACES, refused=unfiltered), False
    refused_to_user = _refusal(_try_all_as_user)
    if not refused_to_user:
        return Isolation(namespaces=("user", *ALL_NAMESPACES), refused=unfiltered), True
    reason = f"no namespaces: {refused}; nor in a user namespace: {refused_to_user}"
    return Isolation(refused="; ".join(filter(None, (reason, unfiltered)))), False


def _refusal(attempt: Callable[[], str], fork: Callable[[], int] = os.fork) -> str:
    """Empty if a child could take all steps, else what the kernel said to the first that it could not."""
    read_end, write_end = os.pipe()
    try:
        child = fork()
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        return str(error)
    if child == 0:
        _report(write_end, attempt)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answers:
        said = answers.read().decode(errors="replace")
    os.waitpid(child, 0)
    return "" if said == "ok" else said or "the trying process was killed"


def _try_all() -> str:
    return _refusal(_try_inside, fork_into_namespaces) or "ok"


def _try_all_as_user() -> str:
    become_user_root()
    return _try_all()


def _try_inside() -> str:
    enter_namespaces(network=False)
    socket.sethostname("probe")
    confine(os.path.dirname(os.path.abspath(__file__)), plan(()), writable_bytes=1 << 20)
    if not stat.S_ISDIR(os.stat("/proc/1").st_mode):
        return "/proc does not show the new namespace"
    give_up_rights()
    return "ok"


def _report(write_end: int, attempt: Callable[[], str]) -> None:
    """Runs the attempt, writes what it said or raised, ends the process."""
    try:
        said = attempt()
    except Exception as error:
        said = str(error) or repr(error)
    os.write(write_end, said.encode()[:4096])
    os._exit(0)
