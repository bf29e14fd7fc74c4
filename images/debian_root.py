"""Base image from this machine's own Debian packages, for where no registry is reached.

A root with the few packages that Python needs around it, as Debian's own database has them installed, and with the
interpreter that runs this: about a second, where debootstrap takes minutes and a mirror. Files of the machine itself
(accounts, hosts, keys) are not in it.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .distributions import python_version

WANTED = ("base-files", "ca-certificates", "coreutils", "dash", "libstdc++6", "netbase", "tzdata")
"""Packages around Python: a shell and its tools, certificates, and the library that compiled modules need."""
LEFT_OUT = frozenset({"debconf", "dpkg", "openssl", "perl-base", "mime-support"})
"""Packages that only the installation of others needs."""
_DOCS = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/info", "/usr/share/lintian")
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders that are links into /usr; packages still name files by them."""
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_FOLDERS = ("dev", "proc", "run", "sys", "tmp", "root", "opt", "var", "var/lib")
_UNUSED = (
    "test",
    "tests",
    "tkinter",
    "turtledemo",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "site-packages",
    "dist-packages",
)
"""Folders of Python's library that no server imports."""
_CERTIFICATES = Path("/etc/ssl/certs")


class NoDebian(OSError):
    """This machine has no Debian packages to make a base of, or lacks some."""


def write_root(target: Path) -> list[str]:
    """Writes a root as a tar; returns the packages that are in it. Errors: NoDebian."""
    if shutil.which("dpkg-query") is None:
        raise NoDebian("this machine has no dpkg: a base image can be made of Debian's own packages only")
    packages = dependencies(WANTED, _installed())
    shown = {path: path for path in root_paths(_query("--listfiles", *packages).splitlines())}
    shown |= {path: path for path in root_paths(map(str, _CERTIFICATES.glob("*")))}
    for path, source in interpreter_files().items():
        shown.setdefault(path, source)
    with tarfile.open(target, "w") as tar:
        for folder in _FOLDERS:
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(member)
        for name in _MERGED:
            if os.path.islink(f"/{name}"):
                add_plain(tar, f"/{name}", name)
        for path, source in sorted(shown.items()):
            add_plain(tar, source, path.lstrip("/"))
        link = tarfile.TarInfo("usr/local/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, f"python{python_version()}"
        tar.addfile(link)
        for name, text in _FILES.items():
            data = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packages


def dependencies(wanted: Iterable[str], installed: Mapping[str, str]) -> list[str]:
    """The wanted packages and what they depend on. `installed`: what each installed package depends on, as Debian
    writes it. Of alternatives the installed one is taken. Errors: NoDebian, naming a wanted package that is missing."""
    found: set[str] = set()
    waiting = list(wanted)
    for name in waiting:
        if name not in installed:
            raise NoDebian(f"the Debian package {name} is not installed here, and a base image needs it")
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for group in filter(None, (part.strip() for part in installed[name].split(","))):
            names = [one.split("(")[0].split(":")[0].strip() for one in group.split("|")]
            here = next((one for one in names if one in installed), None)
            if here is not None and here not in LEFT_OUT:
                waiting.append(here)
    return sorted(found)


def root_paths(listed: Iterable[str]) -> list[str]:
    """Real paths of what packages have, without documentation and without what is gone."""
    found = set()
    for path in listed:
        if not path.startswith("/") or path == "/." or path.startswith(_DOCS):
            continue
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        name = real.lstrip("/")
        if os.path.lexists(real) and name not in _FILES and name not in _FOLDERS and name not in _MERGED:
            found.add(real)
    return sorted(found)


def interpreter_files() -> dict[str, str]:
    """Files of this interpreter and of the libraries that it and its modules load: by their path in the image, where
    they are here. It is in /usr/local there, and finds its library by its own place."""
    name = f"python{python_version()}"
    program = os.path.realpath(sys.executable)
    library = Path(os.__file__).parent
    found = {f"/usr/local/bin/{name}": program}
    loaded = [program]
    for source in sorted(library.rglob("*")):
        inner = source.relative_to(library)
        unused = {*_UNUSED} & {*inner.parts} or inner.parts[0].startswith("config-") or "_tkinter" in inner.name
        if not unused and source.is_file():
            found[f"/usr/local/lib/{name}/{inner}"] = os.path.realpath(source)
            loaded += [str(source)] if source.suffix == ".so" else []
    for path in _libraries(loaded):
        # One beside the interpreter is found by a path of this machine; /usr/lib is always looked in.
        here = os.path.realpath(os.path.dirname(path))
        found[f"{here if here.startswith('/usr/lib') else '/usr/lib'}/{os.path.basename(path)}"] = os.path.realpath(
            path
        )
    return found


def _libraries(programs: Sequence[str]) -> list[str]:
    """Paths of the libraries that the loader finds for programs and modules."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False, env={"LC_ALL": "C"})
    words = (line.split() for line in done.stdout.splitlines())
    return sorted({line[2] for line in words if len(line) > 2 and line[1] == "=>" and line[2].startswith("/")})


def _installed() -> dict[str, str]:
    lines = _query("--show", "--showformat", "${Package}\t${db:Status-Status}\t${Pre-Depends}, ${Depends}\n")
    rows = (line.split("\t") for line in lines.splitlines())
    return {row[0]: row[2] for row in rows if len(row) == 3 and row[1] == "installed"}


def _query(*arguments: str) -> str:
    done = subprocess.run(["dpkg-query", *arguments], capture_output=True, text=True, check=False, env={"LC_ALL": "C"})
    if done.returncode and not done.stdout:
        raise NoDebian(f"dpkg-query failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def add_plain(tar: tarfile.TarFile, source: str, name: str) -> None:
    """Adds a file, folder or link without this machine's owners, and without privileged programs' bits; devices are
    left out."""
    member = tar.gettarinfo(source, name)
    if member.islnk():  # a second name of a file, which tarfile would have as a link to the first
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", os.path.getsize(source)
    if not (member.isreg() or member.isdir() or member.issym()):
        return
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode &= 0o1777
    if member.isreg():
        with open(source, "rb") as data:
            tar.addfile(member, data)
        return
    member.mtime = 0  # a folder's changes with whatever is installed beside
    tar.addfile(member)
