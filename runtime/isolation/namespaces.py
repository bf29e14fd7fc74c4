"""Isolation of a worker by Linux namespaces, in two steps: pooled workers are forked before their function is known.

*At the fork* (`fork_into_namespaces`, `enter_namespaces`): a pid namespace in which the worker is process 1,
mount, ipc and uts namespaces, and, unless the function asked for the network, a net namespace with a
loopback of its own.

*At the assignment* (`confine`), before the first line of user code: the whole tree read-only; a fresh
/proc, /tmp and /dev/shm; /dev with the harmless devices alone; empty /run, home folders (but for
the files that Python runs from) and hidden folders of the node (its state folder with Redis' socket, the
store and other functions' bundles); the function's bundle, read-only, at /tmp/function, and the layer with its
packages, read-only, at its path; then no capabilities, no new privileges, a seccomp filter (`seccomp`) and resource
limits.

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
import functools
import importlib.util
import os
import pwd
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from . import linux, seccomp

FUNCTION_DIR = "/tmp/function"
"""Bundle folder of a confined worker: its working folder and the first entry of sys.path."""
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_PREFIXES = ("nvidia", "dri")
"""Device names of GPUs, beside the harmless ones."""
HOMES = ("/root", "/home")
"""Folders with people's keys and tokens, masked. The daemon's own home is masked wherever it is."""
OPEN_FILES_MAX = 4096
_MASK_OPTIONS = "size=64k,mode=755"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Isolation that a machine supports, probed at the start of a fork server."""

    namespaces: tuple[str, ...] = ()
    refused: str = ""
    """Reason why part of the isolation is missing; empty if nothing is."""

    def describe(self, *, network: bool = False) -> str:
        """The namespaces of one worker, for example "mnt,pid,ipc,uts,net"; empty for a plain process."""
        return ",".join(name for name in self.namespaces if not (network and name == "net"))


ALL_NAMESPACES = ("mnt", "pid", "ipc", "uts", "net")


@dataclass(frozen=True, slots=True)
class MountStep:
    """One mount: `mask` covers a folder with an empty tmpfs, `keep` makes a path below it visible again."""

    kind: Literal["mask", "keep"]
    path: str


def mount_steps(masks: Iterable[str], keeps: Iterable[str]) -> tuple[MountStep, ...]:
    """Ordered mount steps: from the root downwards, so that the nearest mask or keep wins.

    Paths are absolute and normal. A kept path that no mask covers needs no step; a path in both is masked.
    """
    masked = set(masks)
    kept = {path for path in keeps if path not in masked and any(parent in masked for parent in _parents(path))}
    steps = [MountStep("mask", path) for path in masked] + [MountStep("keep", path) for path in kept]
    return tuple(sorted(steps, key=lambda step: (step.path.count("/"), step.path)))


def _parents(path: str) -> Iterable[str]:
    while (path := os.path.dirname(path)) != "/":
        yield path


def plan(hide: Iterable[str], library_path: str) -> tuple[MountStep, ...]:
    """Mount steps of this machine, made once by a fork server for all its workers. `library_path`: LD_LIBRARY_PATH."""
    devices = [f"/dev/{name}" for name in os.listdir("/dev") if name in DEVICES or name.startswith(DEVICE_PREFIXES)]
    keeps = [*interpreter_paths(library_path), *devices, os.path.realpath("/etc/resolv.conf")]
    masks = ["/tmp", "/dev", "/run", *HOMES, *hide]
    with contextlib.suppress(KeyError):  # an id without a name has no home
        masks.append(pwd.getpwuid(os.getuid()).pw_dir)
    return mount_steps({path for path in map(os.path.realpath, masks) if path != "/"}, keeps)


def interpreter_paths(library_path: str) -> list[str]:
    """Folders that this Python runs from, which stay visible below a masked folder (a checkout in /tmp).

    `library_path` is the value of LD_LIBRARY_PATH.
    """
    package = Path(__file__).resolve().parents[1]
    native = importlib.util.find_spec("fleetstart.native")  # found, not imported: only some workers need it
    libraries = library_path.split(":")
    # An editable installation adds the folder around the checkout to sys.path. Nothing is imported from there, and
    # workers would see all that lies beside the checkout.
    modules = [path for path in map(os.path.realpath, filter(None, sys.path)) if not _surrounds(path, package)]
    found = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *libraries) if path} | set(modules)
    found.add(str(package))
    if native is not None and native.origin is not None:
        found.add(os.path.dirname(os.path.realpath(native.origin)))
    return sorted(path for path in found if os.path.isdir(path))


def _surrounds(path: str, package: Path) -> bool:
    """Whether `path` holds the package otherwise than as a folder of installed packages."""
    return Path(path) in package.parents and not path.endswith(("site-packages", "dist-packages"))


def fork_into_namespaces() -> int:
    """Forks a direct child that is process 1 of a new pid namespace.

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
    """Enters the other namespaces, in the new child. With `network`, it stays in the node's network."""
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    linux.unshare(flags if network else flags | linux.CLONE_NEWNET)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    if not network:
        linux.loopback_up()


def confine(
    bundle_dir: str,
    steps: Iterable[MountStep],
    *,
    writable_bytes: int,
    terminals: bool = False,
    layer_dir: str = "",
    volumes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Confines a worker that has its namespaces: mounts, read-only tree, bundle. Call it in a single-threaded process.

    `writable_bytes` limits /tmp and /dev/shm together. Afterwards the working folder is FUNCTION_DIR. With `terminals`,
    the worker gets its own instance of devpts. `layer_dir` stays visible at its path, and nothing beside it. `volumes`
    are folders of the node by their path below /tmp.
    """
    if layer_dir:
        steps = (*steps, MountStep("keep", layer_dir))
    if terminals:
        steps = (*steps, MountStep("keep", "/dev/tty"))
    trees = {step.path: linux.open_tree(step.path) for step in steps if step.kind == "keep" and _exists(step.path)}
    folders = {path: os.path.isdir(path) for path in trees}
    bundle = linux.open_tree(bundle_dir)
    mounted = {path: linux.open_tree(folder) for path, folder in volumes.items()}

    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    for step in steps:
        if step.kind == "keep" and step.path in trees:
            _move_mount(trees.pop(step.path), step.path, folder=folders[step.path])
        elif step.kind == "mask" and os.path.isdir(step.path):
            _mask(step.path, writable_bytes)
    _make_device_links()
    _move_mount(bundle, FUNCTION_DIR, folder=True)
    for path, tree in mounted.items():
        _move_mount(tree, path, folder=True)
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
    """Whether a path can be opened; False also for a device whose driver was removed."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _mask(path: str, writable_bytes: int) -> None:
    flags = linux.MS_NOSUID | (0 if path == "/dev" else linux.MS_NODEV)
    options = f"size={writable_bytes // 2},mode=1777" if path == "/tmp" else _MASK_OPTIONS
    linux.mount("tmpfs", path, "tmpfs", flags, options)


def _move_mount(tree_fd: int, path: str, *, folder: bool) -> None:
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


def drop_privileges() -> None:
    """Drops capabilities and new privileges, installs the seccomp filter, sets limits; for plain processes, too."""
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
    """Enters a user namespace with the same user id, in which an unprivileged user may create the other namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def become_user_root() -> None:
    """Continues the program as process 1 of a pid namespace inside a user namespace; its parent only waits for it.

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


def probe(library_path: str) -> tuple[Isolation, bool]:
    """Isolation that this machine supports, tried in a child process, and whether it needs `become_user_root`."""
    attempt = functools.partial(_try_all, library_path)
    unfiltered = "" if seccomp.supported() else "no seccomp filter: this architecture's call numbers are not known"
    refused = _failure(attempt)
    if not refused:
        return Isolation(namespaces=ALL_NAMESPACES, refused=unfiltered), False
    failure_as_user = _failure(functools.partial(_try_all_as_user, library_path))
    if not failure_as_user:
        return Isolation(namespaces=("user", *ALL_NAMESPACES), refused=unfiltered), True
    reason = f"no namespaces: {refused}; nor in a user namespace: {failure_as_user}"
    return Isolation(refused="; ".join(filter(None, (reason, unfiltered)))), False


def _failure(attempt: Callable[[], str], fork: Callable[[], int] = os.fork) -> str:
    """Error of the first step that failed in a child process; empty if all succeeded."""
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
    return "" if said == "ok" else said or "the probing process was killed"


def _try_all(library_path: str) -> str:
    return _failure(functools.partial(_try_inside, library_path), fork_into_namespaces) or "ok"


def _try_all_as_user(library_path: str) -> str:
    become_user_root()
    return _try_all(library_path)


def _try_inside(library_path: str) -> str:
    enter_namespaces(network=False)
    socket.sethostname("probe")
    confine(os.path.dirname(os.path.abspath(__file__)), plan((), library_path), writable_bytes=1 << 20)
    if not stat.S_ISDIR(os.stat("/proc/1").st_mode):
        return "/proc does not show the new namespace"
    drop_privileges()
    return "ok"


def _report(write_end: int, attempt: Callable[[], str]) -> None:
    """Runs the attempt, writes its result or error to the pipe, ends the process."""
    try:
        said = attempt()
    except Exception as error:
        said = str(error) or repr(error)
    os.write(write_end, said.encode()[:4096])
    os._exit(0)
