"""Isolation of a worker by Linux namespaces, in three steps: pooled workers are forked before their function is known.

*Once for a fork server* (`prepare_root`): a mount namespace of its own, in which the root of its workers is built
(`root`).

*At the fork* (`fork_into_namespaces`, `enter_namespaces`): a pid namespace in which the worker is process 1,
mount, ipc and uts namespaces, and, unless the function asked for the network, a net namespace with a
loopback of its own; the built root in place of the node's, a fresh /proc without what tells of the machine, in which
only the folders of processes can be written, a private /run.

*At the assignment* (`confine`, `drop_privileges`), before the first line of user code: a private /tmp and /dev/shm; no
device files of GPUs that are others' (`gpu_files`); the function's bundle, read-only, at /tmp/function, the layer with
its packages, its volumes; the folder of the node that these are taken from is covered for good. Then a user id that no
other function has, no capabilities, no new privileges, a seccomp filter (`seccomp`) and resource limits.

An ordinary user gets the namespaces inside a user namespace, and workers keep that user's id there: other ids cannot be
had without rights. So do workers of a Python that only its owner may read.

Where the kernel refuses namespaces (a container engine's default profile, for one), a worker is a plain
process: it still loses its capabilities, gets no new privileges, the filter and the limits, and it says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..contract.function.layer import LAYER_DIR
from . import linux, root, seccomp
from .root import NODE_DIR

THREADS_END_S = 5.0
"""Limit of the wait for threads that have been joined; those that go on are refused by the kernel as ever."""
FUNCTION_DIR = "/tmp/function"
"""Bundle folder of a confined worker: its working folder and the first entry of sys.path."""
OPEN_FILES_MAX = 4096
MASKED_IN_PROC = (
    "acpi", "asound", "bus", "fs", "interrupts", "irq", "kallsyms", "kcore", "key-users", "keys", "latency_stats",
    "modules", "sched_debug", "scsi", "slabinfo", "sysrq-trigger", "timer_list", "vmallocinfo",
)  # fmt: skip
"""Entries of /proc that tell of the machine and not of the worker, and that no library needs."""
BYTES_PER_INODE, INODES_LEAST = 4096, 1024
"""An empty file takes about a kilobyte of the kernel's memory: names must not take more of it than bytes may."""
_PRIVATE = linux.MS_NOSUID | linux.MS_NODEV
_READ_ONLY = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV


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
OWN_USER = "uid"
"""Name, beside those of the namespaces, of a user id for each function."""


def prepare_root(plan: root.Root, at: str) -> None:
    """Enters a mount namespace with the root of future workers, built on the empty folder `at`. Errors: OSError."""
    linux.unshare(linux.CLONE_NEWNS)
    # Disks that the node mounts later, or unmounts, are so here, too; nothing that is mounted here is so there.
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_SLAVE)
    root.build(plan, at)
    linux.mount("none", at, None, linux.MS_REC | linux.MS_PRIVATE)


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


def enter_namespaces(plan: root.Root, at: str, shared: Iterable[str], *, network: bool) -> None:
    """Enters the other namespaces, in the new child, with the root that was built on `at`.

    Of the node's own tree the `shared` folders are at NODE_DIR until the worker is confined: its code, packages and
    volumes will be in them. With `network`, it stays in the node's network.
    """
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    linux.unshare(flags if network else flags | linux.CLONE_NEWNET)
    resolver = _text_of("/etc/resolv.conf") if network else ""
    trees = {path: linux.open_tree(path) for path in (*shared, "/dev/tty") if os.path.exists(path)}
    linux.pivot_root(at, at + NODE_DIR)
    os.chdir("/")
    root.cover("/run", "size=256k,mode=755", root.inside(plan, "/run"))
    for folder in ("/tmp", "/dev/shm"):
        root.cover(folder, "size=64k,mode=1777", root.inside(plan, folder))
    Path("/run/resolv.conf").write_text(resolver)
    linux.mount("proc", "/proc", "proc", _PRIVATE | linux.MS_NOEXEC)
    _mask_proc()
    _protect_proc()
    # Unmounting waits for all processors: here, ahead of a call, and not when the worker is assigned.
    linux.detach(NODE_DIR)
    linux.mount("tmpfs", NODE_DIR, "tmpfs", _PRIVATE, "size=64k,mode=700")
    for path, tree in trees.items():
        root.attach(tree, NODE_DIR + path, folder=path != "/dev/tty")
    if not network:
        linux.loopback_up()


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _mask_proc() -> None:
    """Covers entries of /proc: a file with /dev/null, a folder with an empty one."""
    for name in MASKED_IN_PROC:
        path = f"/proc/{name}"
        with contextlib.suppress(FileNotFoundError):
            folder = stat.S_ISDIR(os.stat(path).st_mode)
            root.attach(linux.open_tree(LAYER_DIR if folder else "/dev/null"), path, folder=folder)


def _protect_proc() -> None:
    """Makes all of /proc read-only but the folders of processes, which give a process nothing that is not its own. CUDA
    does not start where it cannot name its threads there."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() or entry.is_symlink():
            continue
        # Also what has no write bits: its owner, who is root, may set them, for all of the machine.
        tree = linux.open_tree(entry.path)
        linux.set_mount_attributes(tree, linux.MOUNT_ATTR_RDONLY, recursive=True)
        root.attach(tree, entry.path, folder=entry.is_dir())


def confine(
    bundle_dir: str,
    *,
    name: str,
    user: int,
    writable_bytes: int,
    terminals: bool = False,
    layer_dir: str = "",
    volumes: Mapping[str, str] = MappingProxyType({}),
    hidden: Iterable[str] = (),
) -> None:
    """Gives a worker that has its namespaces the folders of its function, and takes the node's from it. Call it in a
    single-threaded process.

    `name` is the worker's host name, `user` the id that it will have, 0 if it keeps its own. `writable_bytes` limits
    /tmp and /dev/shm together. Afterwards the working folder is FUNCTION_DIR. With `terminals`, the worker gets its own
    instance of devpts. `layer_dir` is a folder of the node, shown at LAYER_DIR; `volumes` are by their path below /tmp.
    `hidden`: devices of the root that it does not see.
    """
    for device in hidden:
        linux.detach(device)
    for folder in ("/tmp", "/dev/shm"):
        inodes = max(INODES_LEAST, writable_bytes // 2 // BYTES_PER_INODE)
        options = f"size={writable_bytes // 2},nr_inodes={inodes}"
        linux.mount("tmpfs", folder, None, _PRIVATE | linux.MS_REMOUNT, options)
    _show(bundle_dir, FUNCTION_DIR)
    if layer_dir:
        _show(layer_dir, LAYER_DIR)
    for path, folder in volumes.items():
        _show(folder, path)
    if terminals:
        linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666")
        root.attach(linux.open_tree(f"{NODE_DIR}/dev/tty"), "/dev/tty", folder=False)
    for file, text in root.name_files(name, user or os.getuid()).items():
        Path("/run", file).write_text(text)
    linux.set_mount_attributes("/run", linux.MOUNT_ATTR_RDONLY, recursive=False)
    linux.mount("tmpfs", NODE_DIR, "tmpfs", _PRIVATE | linux.MS_RDONLY, "size=4k,mode=755")
    os.chdir(FUNCTION_DIR)


def _show(folder: str, path: str) -> None:
    """Mounts a folder of the node, read-only."""
    tree = linux.open_tree(NODE_DIR + folder)
    linux.set_mount_attributes(tree, _READ_ONLY, recursive=True)
    root.attach(tree, path, folder=True)


def drop_privileges(user: int = 0, *, node_network: bool = False) -> None:
    """Drops capabilities and new privileges, installs the seccomp filter, sets limits; for plain processes, too.

    `user`: the user and group id that the process takes, 0 if it keeps its own. `node_network`: whether it has the
    node's network, where abstract unix sockets of others would be open to it, and hand over their descriptors.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(OPEN_FILES_MAX, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user:
        _change_user(user)
    linux.drop_capabilities()
    linux.forbid_new_privileges()
    local_sockets = not node_network or linux.scope_abstract_sockets()
    if seccomp.supported():
        seccomp.install(local_sockets=local_sockets)
    linux.die_with_parent(signal.SIGKILL)


def limit_file_size(size_bytes: int) -> None:
    """No file may become larger than the worker's memory: what it writes is in memory, sparse files excepted."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def _change_user(user: int) -> None:
    """Takes a user and group id, and the groups that GPUs' devices want."""
    linux.empty_bounding_set()
    os.setgroups(_device_groups())
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    linux.become_dumpable()


def _device_groups() -> list[int]:
    """Groups of GPUs' devices that are open to their group and not to all."""
    found = [path.stat() for folder in ("/dev", "/dev/dri") for path in _files(folder)]
    return sorted({state.st_gid for state in found if state.st_gid and state.st_mode & 0o060 and not state.st_mode & 6})


def _files(folder: str) -> Iterable[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from (path for path in Path(folder).iterdir() if stat.S_ISCHR(path.lstat().st_mode))


def enter_user_namespace() -> None:
    """Enters a user namespace with the same user id, in which an unprivileged user may create the other namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    _await_single_thread()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _await_single_thread() -> None:
    """Waits for threads that have been joined: the kernel counts them until they are gone, and refuses a process with
    several of them a user namespace."""
    ends_s = time.monotonic() + THREADS_END_S
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < ends_s:
        time.sleep(0.01)


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


def probe(library_path: str, at: str, user: int) -> tuple[Isolation, bool]:
    """Isolation that this machine supports, tried in child processes, and whether it needs `become_user_root`.

    `at`: an empty folder, on which a root is built; `user`: an id that workers would get, 0 if they shall keep theirs.
    """
    unfiltered = "" if seccomp.supported() else "no seccomp filter: this architecture's call numbers are not known"
    refused = _failure(functools.partial(_try_all, library_path, at, 0))
    if not refused:
        unshared = _failure(functools.partial(_try_all, library_path, at, user)) if user else "it is not asked for"
        if unshared:
            sys.stderr.write(f"workers have the user id of the daemon, {os.getuid()}, and not one each: {unshared}\n")
        names = ALL_NAMESPACES if unshared else (*ALL_NAMESPACES, OWN_USER)
        return Isolation(namespaces=names, refused=unfiltered), False
    failure_as_user = _failure(functools.partial(_try_all_as_user, library_path, at))
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


def _try_all(library_path: str, at: str, user: int) -> str:
    plan = root.plan_for_this_python((), library_path)
    prepare_root(plan, at)
    return _failure(functools.partial(_try_inside, plan, at, user), fork_into_namespaces) or "ok"


def _try_all_as_user(library_path: str, at: str) -> str:
    become_user_root()
    return _try_all(library_path, at, 0)


def _try_inside(plan: root.Root, at: str, user: int) -> str:
    package = os.path.dirname(os.path.abspath(__file__))
    enter_namespaces(plan, at, (package,), network=False)
    socket.sethostname("probe")
    confine(package, name="probe", user=user, writable_bytes=1 << 20)
    if not stat.S_ISDIR(os.stat("/proc/1").st_mode):
        return "/proc does not show the new namespace"
    drop_privileges(user)
    if user and (closed := _closed_to_others()):
        return f"this Python runs from {closed}, which other users may not read"
    return "ok"


def _closed_to_others() -> str:
    """A path that Python runs from and that this user may not read; empty if there is none."""
    wanted = dict.fromkeys((sys.executable, os.__file__, __file__), os.R_OK)
    wanted |= dict.fromkeys((path for path in sys.path if path and os.path.isdir(path)), os.R_OK | os.X_OK)
    return next((path for path, mode in wanted.items() if not os.access(path, mode)), "")


def _report(write_end: int, attempt: Callable[[], str]) -> None:
    """Runs the attempt, writes its result or error to the pipe, ends the process."""
    try:
        said = attempt()
    except Exception as error:
        said = str(error) or repr(error)
    os.write(write_end, said.encode()[:4096])
    os._exit(0)
