"""The base image of generic containers: folders, symbolic links and a file, and no programs.

Programs, libraries and this Python are those of the node, mounted read-only over it, as in a sandbox of gVisor. So the
image is made in milliseconds, needs no registry, and fits whatever the node runs.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable

from ..contract.function.layer import LAYER_DIR
from ..isolation.root import NAME_SERVICES, Mount, Root

OWN_DIR = "/run/fleetstart"
"""Where a container has its control socket and the files that name its user."""
REPOSITORY = "fleetstart-empty"
_KERNEL = ("/dev", "/proc", "/sys")
_FOLDERS = ("/tmp", "/run", "/etc", "/var", "/dev", "/proc", "/sys", LAYER_DIR, OWN_DIR)
_LINKS = (("/etc/passwd", f"{OWN_DIR}/passwd"), ("/etc/group", f"{OWN_DIR}/group"), ("/var/tmp", "/tmp"))


def shown_mounts(plan: Root) -> tuple[Mount, ...]:
    """The mounts of a plan but those of the kernel's own file systems, which the engine provides."""
    return tuple(mount for mount in plan.mounts if not mount.path.startswith(tuple(f"{one}/" for one in _KERNEL)))


def base_image(plan: Root) -> tuple[str, bytes]:
    """Tag and tar of the image for a plan of mounts; the tag is that of the content."""
    folders = {parent for folder in _FOLDERS for parent in _with_parents(folder)}
    for mount in shown_mounts(plan):
        folders.update(_with_parents(os.path.dirname(mount.path)))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in sorted(folders):
            tar.addfile(_member(folder, tarfile.DIRTYPE, 0o1777 if folder == "/tmp" else 0o755))
        for path, target in sorted(_links(plan)):
            link = _member(path, tarfile.SYMTYPE, 0o777)
            link.linkname = target
            tar.addfile(link)
        names = _member("/etc/nsswitch.conf", tarfile.REGTYPE, 0o644)
        names.size = len(NAME_SERVICES)
        tar.addfile(names, io.BytesIO(NAME_SERVICES.encode()))
    data = packed.getvalue()
    return f"{REPOSITORY}:{hashlib.sha256(data).hexdigest()[:16]}", data


def _links(plan: Root) -> Iterable[tuple[str, str]]:
    """Links of the image; those below a folder that is mounted, or that is the worker's own, cannot be in it."""
    covered = ("/tmp", *_KERNEL)
    own = dict(_LINKS)
    return [
        *_LINKS,
        *((path, target) for path, target in plan.links if path not in own and not path.startswith(covered)),
    ]


def _with_parents(folder: str) -> list[str]:
    """The folder and those above it, without the root."""
    parts = [part for part in folder.split("/") if part]
    return ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]


def _member(path: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.type, member.mode = kind, mode
    return member
