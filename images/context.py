"""Build context of an image: a tar with its build file, the packages that it adds, their bytecode and its SBOM.

Names, order, modes and times in it follow from what is packed alone, so the engine finds each unchanged layer in its
cache.
"""

from __future__ import annotations

import importlib.util
import io
import py_compile
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO

from .definitions import ImageDefinition
from .distributions import files_of, python_version
from .sbom import sbom

PACKAGES = "packages.tar"
"""Archive of the packages in the context, which the engine unpacks into its layer: one file passes through the context
in place of ten thousand."""
SITE_PACKAGES = f"/opt/fleetstart/lib/python{python_version()}/site-packages"
PYC_HEADER_BYTES = 16
_FS = b"""#!/opt/fleetstart/bin/python
import sys

from fleetstart.controller.cli import main

sys.exit(main())
"""
_SPOOL_BYTES = 64 << 20
"""A context below this size stays in memory."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """A context as it is sent to the engine."""

    file: IO[bytes]
    size_bytes: int
    distributions: tuple[str, ...]
    """Names and versions of the distributions that this image adds."""


def write_context(
    image: ImageDefinition,
    *,
    adds: Mapping[str, metadata.Distribution],
    has: Mapping[str, metadata.Distribution],
    progress: Callable[[int], None] = lambda done: None,
) -> BuildContext:
    """Packs the context of an image. `adds`: distributions beyond those of its parent; `has`: all that are in it.
    Errors: OSError, if a file is gone meanwhile."""
    file = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 - the caller closes it
    with tarfile.open(fileobj=file, mode="w") as tar:
        build_file = Path(__file__).with_name(f"{image.name}.Dockerfile")
        _add(tar, "Dockerfile", build_file.read_bytes(), 0)
        newest = _add_packages(tar, adds.values(), progress) if image.has_packages else 0
        if image.has_fs:
            _add(tar, "fs", _FS, newest, mode=0o755)
        if image.has_packages:
            _add(tar, "sbom.cdx.json", sbom(image, has, newest).encode(), newest)
    size = file.tell()
    file.seek(0)
    named = tuple(f"{name}=={one.version}" for name, one in adds.items())
    return BuildContext(file, size, named)


def _add_packages(
    context: tarfile.TarFile, distributions: Iterable[metadata.Distribution], progress: Callable[[int], None]
) -> int:
    """Adds the archive of the packages; returns the time of its newest file."""
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            newest = _pack(tar, distributions, progress)
        member = _member(PACKAGES, packed.tell(), newest)
        packed.seek(0)
        context.addfile(member, packed)
    return newest


def _pack(tar: tarfile.TarFile, distributions: Iterable[metadata.Distribution], progress: Callable[[int], None]) -> int:
    """Packs files with their bytecode; returns the time of the newest one."""
    newest = 0
    folders: set[str] = set()
    for distribution in distributions:
        for path, source in files_of(distribution):
            _add_folders(tar, path, folders)
            stat = source.stat()
            newest = max(newest, int(stat.st_mtime))
            member = _member(path, stat.st_size, int(stat.st_mtime))
            with source.open("rb") as data:
                tar.addfile(member, data)
            if source.suffix == ".py" and (compiled := bytecode(source, f"{SITE_PACKAGES}/{path}")) is not None:
                cached = importlib.util.cache_from_source(path)
                _add_folders(tar, cached, folders)
                _add(tar, cached, compiled, int(stat.st_mtime))
            progress(tar.offset)
    return newest


def _add_folders(tar: tarfile.TarFile, path: str, known: set[str]) -> None:
    """Adds the folders above a path, as engines differ in the rights of those that an archive does not name."""
    for folder in reversed(PurePosixPath(path).parents):
        if str(folder) != "." and str(folder) not in known:
            known.add(str(folder))
            member = tarfile.TarInfo(str(folder))
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)


def bytecode(source: Path, path: str) -> bytes | None:
    """The bytecode of a module: what is beside it, if it is of this very file; else compiled, with the name `path` in
    tracebacks. None for a file that is no Python, as some packages have among their tests."""
    stat = source.stat()
    expected = b"\0\0\0\0" + (int(stat.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
    expected = importlib.util.MAGIC_NUMBER + expected + (stat.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    cached = Path(importlib.util.cache_from_source(str(source)))
    if cached.is_file() and (data := cached.read_bytes())[:PYC_HEADER_BYTES] == expected:
        return data
    with tempfile.NamedTemporaryFile(suffix=".pyc") as made:
        try:
            py_compile.compile(str(source), made.name, path, doraise=True)
        except py_compile.PyCompileError:
            return None
        return Path(made.name).read_bytes()


def _add(tar: tarfile.TarFile, name: str, data: bytes, time_s: int, *, mode: int = 0) -> None:
    member = _member(name, len(data), time_s)
    member.mode = mode or member.mode
    tar.addfile(member, io.BytesIO(data))


def _member(name: str, size: int, time_s: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = size, time_s
    # Compiled modules need no bit to be loaded, and programs in packages (torch's) are run by their path.
    member.mode = 0o755 if "/bin/" in name else 0o644
    return member
