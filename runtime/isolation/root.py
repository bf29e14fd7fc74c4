"""Root of a confined worker: a tree that is built of what a function needs, instead of the node's own.

It is planned and built once for each fork server, in its own mount namespace, and read-only from then on; each worker
gets a copy of the mounts with its namespace. It holds the system's programs and libraries (`SYSTEM`), what this Python
runs from, the harmless devices and those of GPUs, and files that say nothing of the node. What differs between
workers has its places in it: `/proc`, `/tmp`, `/dev/shm`, `/layer`, `/run` with the files of /etc that name a user.

The paths are the node's, also where a symbolic link leads to them, since Python remembers paths as it found them.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..contract.function.layer import LAYER_DIR
from . import linux
from .gpu_files import is_gpu_file

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
    "/etc/mime.types", "/etc/protocols", "/etc/services",
    "/etc/ca-certificates", "/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf", "/etc/pki/ca-trust/extracted",
    "/etc/crypto-policies/back-ends",
)  # fmt: skip
"""Folders and files of the node that a worker sees, where they exist. Not /etc/ssl itself: it may hold keys."""
HARDWARE = ("/sys/devices/system/cpu", "/sys/devices/system/node")
"""Counts and layout of processors and memory, for libraries that choose their number of threads by them."""
GPU_HARDWARE = ("/sys/bus/pci/devices", "/sys/devices/pci*", "/sys/class/drm", "/sys/class/kfd", "/sys/module/nvidia*")
"""What the drivers of GPUs look up beside it, where there are any."""
DEVICES = ("null", "zero", "full", "random", "urandom")
NODE_DIR = "/.node"
"""Where a waiting worker has the node's own tree, until it has its function."""
OWN_FOLDERS = ("/tmp", "/run", "/proc", "/dev/shm", "/dev/pts", "/etc", "/var", NODE_DIR, LAYER_DIR)
OWN_LINKS = (
    *((f"/etc/{name}", f"/run/{name}") for name in ("passwd", "group", "hosts", "resolv.conf")),
    ("/var/tmp", "/tmp"),
    ("/var/run", "/run"),
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    ("/dev/ptmx", "pts/ptmx"),
)
NAME_SERVICES = "passwd: files\ngroup: files\nhosts: files dns\n"
OWN_FILES = (("/etc/nsswitch.conf", NAME_SERVICES), ("/dev/tty", ""))
"""/dev/tty is a place for the device, which shells get."""
_OPTIONS = "size=1m,mode=755"
_LINKS_MAX = 40
"""Symbolic links on one path, as the kernel limits them."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount; without `source` an empty folder."""

    path: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Root:
    """Plan of a root: mounts from the root downwards, and symbolic links by their path."""

    mounts: tuple[Mount, ...]
    links: tuple[tuple[str, str], ...] = ()


def mounts(shown: Collection[tuple[str, str]], hidden: Iterable[str]) -> tuple[Mount, ...]:
    """Ordered mounts of a root, downwards, for `shown` pairs (path, source) without `hidden` ones.

    Paths are absolute and normal. A path that is both shown and hidden is hidden; a shown path below a hidden one is
    shown; a path that its parent shows already needs no mount.
    """
    covers = [path for path in hidden if any(_within(path, source) for _, source in shown)]
    wanted = [Mount(path) for path in set(covers)]
    wanted += [Mount(path, source) for path, source in set(shown) if source not in covers]
    chosen: list[Mount] = []
    for mount in sorted(wanted, key=lambda mount: (mount.path.count("/"), mount.path)):
        above = next((one for one in reversed(chosen) if _within(mount.path, one.path)), None)
        if not mount.source or above is None or above.source + mount.path[len(above.path) :] != mount.source:
            chosen.append(mount)
    return tuple(chosen)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def follow(path: str, readlink: Callable[[str], str | None]) -> tuple[str, dict[str, str]]:
    """The real path, and each symbolic link on the way to it: its target by its own real path.

    `readlink` returns a link's target, None for what is no link. A ring of links is left after as many as the kernel
    follows.
    """
    links: dict[str, str] = {}
    parts, real, followed = [part for part in reversed(path.split("/")) if part], "", 0
    while parts:
        part = parts.pop()
        if part in (".", ".."):
            real = os.path.dirname(real).rstrip("/") if part == ".." else real
            continue
        here = f"{real}/{part}"
        target = readlink(here) if followed < _LINKS_MAX else None
        if target is None:
            real = here
            continue
        links[here] = target
        followed += 1
        parts += [part for part in reversed(target.split("/")) if part]
        real = "" if target.startswith("/") else real
    return real or "/", links


def plan(paths: Iterable[str], hide: Iterable[str], readlink: Callable[[str], str | None]) -> Root:
    """Plans a root that shows these paths of the node at their place, without those to hide."""
    links: dict[str, str] = {}
    shown: set[tuple[str, str]] = set()
    for path in paths:
        real, on_the_way = follow(path, readlink)
        links |= on_the_way
        shown.add((real, real))
    chosen = mounts(shown, [follow(path, readlink)[0] for path in hide])
    return Root(chosen, tuple(sorted(link for link in links.items() if not _shows(chosen, link[0]))))


def _shows(chosen: Sequence[Mount], path: str) -> bool:
    """Checks whether the nearest mount above a path shows what the node has there."""
    nearest = next((mount for mount in reversed(chosen) if _within(path, mount.path)), None)
    return nearest is not None and bool(nearest.source)


def plan_for_this_python(hide: Iterable[str], library_path: str) -> Root:
    """The root for workers of this process. `library_path`: LD_LIBRARY_PATH."""
    devices = [f"/dev/{name}" for name in os.listdir("/dev") if name in DEVICES or is_gpu_file(name)]
    hardware = [*HARDWARE]
    if len(devices) > len(DEVICES):
        hardware += [path for pattern in GPU_HARDWARE for path in glob.glob(pattern)]
    certificates = [os.environ.get(name, "") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
    wanted = [*SYSTEM, *hardware, *devices, *filter(os.path.isabs, certificates), *_python_paths(library_path)]
    return plan(filter(_can_be_opened, wanted), hide, _readlink)


def _readlink(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _can_be_opened(path: str) -> bool:
    """Checks whether a path exists; False also for a device whose driver was removed."""
    with contextlib.suppress(OSError):
        os.stat(path)
        return True
    return False


def _python_paths(library_path: str) -> list[str]:
    """Paths of this Python as it knows them, which may lead over links to those of `interpreter_paths`."""
    found = [*interpreter_paths(library_path), *_loaded_libraries(), sys.executable, sys.prefix, sys.base_prefix]
    # Only those whose real path is the interpreter's: the folder around a checkout is on sys.path, too.
    real = set(interpreter_paths(library_path))
    return [*found, *(path for path in sys.path if path and os.path.realpath(path) in real)]


def _loaded_libraries() -> set[str]:
    """The shared libraries that this process has loaded, wherever they lie: their folder, if it is one of libraries."""
    with open("/proc/self/maps") as lines:
        files = {line.split(maxsplit=5)[5].strip() for line in lines if ".so" in line and "/" in line}
    return {library_folder(path) for path in files if path.startswith("/") and os.path.isfile(path)}


def library_folder(path: str) -> str:
    """The folder of a shared library, which has those that it needs; the file alone, if the folder may be anything."""
    folder = os.path.dirname(path)
    return folder if any(part.startswith("lib") for part in folder.split("/")) else path


def interpreter_paths(library_path: str) -> list[str]:
    """Folders that this Python runs from. `library_path` is the value of LD_LIBRARY_PATH."""
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
    """Checks whether `path` holds the package otherwise than as a folder of installed packages."""
    return Path(path) in package.parents and not path.endswith(("site-packages", "dist-packages"))


def inside(root: Root, folder: str) -> Root:
    """The part of a root that lies in one of its folders: what must be mounted again on a worker's own folder there.

    Its mounts are the topmost, with those below them.
    """
    paths = [mount.path for mount in root.mounts if _within(mount.path, folder)]
    tops = [path for path in paths if not any(_within(path, other) for other in paths if other != path)]
    links = tuple(
        link for link in root.links if _within(link[0], folder) and not any(_within(link[0], t) for t in tops)
    )
    return Root(tuple(Mount(path, path) for path in tops), links)


def cover(folder: str, options: str, shown: Root) -> None:
    """Mounts a worker's own folder, and on it again what the root shows there."""
    trees = [(mount.path, os.path.isdir(mount.path), linux.open_tree(mount.path)) for mount in shown.mounts]
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for path, is_folder, tree in trees:
        attach(tree, path, folder=is_folder)
    _link(shown.links)


def _link(links: Iterable[tuple[str, str]], at: str = "") -> None:
    for path, target in links:
        os.makedirs(os.path.dirname(at + path), exist_ok=True)
        with contextlib.suppress(FileExistsError):  # what is shown there comes first
            os.symlink(target, at + path)


def name_files(host: str, user: int) -> dict[str, str]:
    """Files of /etc that name users and hosts, by their names: the worker's own, and those that every system has."""
    users = {0: "root", 65534: "nobody"}
    if user not in users:
        users[user] = "function"
    return {
        "passwd": "".join(f"{who}:x:{number}:{number}::/tmp:/bin/sh\n" for number, who in users.items()),
        "group": "".join(f"{who}:x:{number}:\n" for number, who in users.items()),
        "hosts": f"127.0.0.1 localhost {host}\n::1 localhost ip6-localhost\n",
    }


def build(root: Root, at: str) -> None:
    """Builds a root in this mount namespace, on the folder `at`, read-only. Errors: OSError."""
    trees = {mount.path: linux.open_tree(mount.source) for mount in root.mounts if mount.source}
    linux.mount("tmpfs", at, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _OPTIONS)
    for mount in root.mounts:
        if mount.source:
            attach(trees.pop(mount.path), at + mount.path, folder=os.path.isdir(mount.source))
        else:
            os.makedirs(at + mount.path, exist_ok=True)
            linux.mount("tmpfs", at + mount.path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _OPTIONS)
    for path in OWN_FOLDERS:
        os.makedirs(at + path, exist_ok=True)
    _link((*root.links, *OWN_LINKS), at)
    for path, text in OWN_FILES:
        Path(at + path).write_text(text)
    linux.set_mount_attributes(at, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID, recursive=True)


def attach(tree: int, path: str, *, folder: bool) -> None:
    """Mounts a detached copy on a path, which is made if it does not exist; closes the copy's descriptor."""
    try:
        os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
        if not folder and not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        linux.move_mount(tree, path)
    finally:
        os.close(tree)
