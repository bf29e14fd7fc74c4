"""The bundle of a function: its Python files in one tar, whose digest is its name.

The same files give the same bytes wherever and whenever they are packed: sorted names, no times, no owners.
So an unchanged bundle has an unchanged key, and is not uploaded again.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import os
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from fleetstart.runtime.contract.errors import HandlerSyntax, InvalidSpec, TooLarge
from fleetstart.runtime.contract.ids import BundleId
from fleetstart.runtime.contract.object_keys import bundle_key
from fleetstart.runtime.contract.sizes import MIB

from .source.parse import imports_of, parse

BUNDLE_MAX_BYTES = 64 * MIB
"""Largest bundle. A worker waits for it, and the node caches it: data and weights belong elsewhere."""
FILES_MAX = 10_000

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A packed bundle."""

    id: BundleId
    data: bytes
    files: tuple[str, ...]
    imports: frozenset[str]
    """Top-level modules that any of its files imports."""
    sources: Mapping[str, ast.Module] = field(compare=False, repr=False)
    """Syntax trees of its Python files."""

    @property
    def key(self) -> str:
        return bundle_key(self.id)


def make_bundle(folder: Path, *, include: Collection[str] = (), skip: Collection[Path] = ()) -> Bundle:
    """Packs the folder's Python files and what `include` matches; `skip` names folders that hold weights.

    Errors: InvalidSpec for a pattern that matches nothing or leaves the folder; TooLarge, with the biggest files.
    """
    files = _files(folder, include, {path.resolve() for path in skip})
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total > BUNDLE_MAX_BYTES or len(files) > FILES_MAX:
        biggest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        shown = ", ".join(f"{name} ({sizes[name] / MIB:.1f} MiB)" for name in biggest)
        raise TooLarge(
            f"the bundle of {folder} would have {len(files)} files and {total / MIB:.1f} MiB; "
            f"{FILES_MAX} and {BUNDLE_MAX_BYTES // MIB} MiB at most; the biggest: {shown}",
            hint="weights go into weights=...; keep other large data out of the handler's folder and of include",
        )
    contents = {name: path.read_bytes() for name, path in files.items()}
    data = pack(contents)
    sources = dict(_parsed(contents))
    return Bundle(
        id=BundleId(hashlib.sha256(data).hexdigest()),
        data=data,
        files=tuple(contents),
        imports=frozenset().union(*map(imports_of, sources.values())),
        sources=sources,
    )


def pack(contents: dict[str, bytes]) -> bytes:
    """Packs files into a tar that depends on their names and bytes only."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(contents[name]), 0o644, 0
            archive.addfile(member, io.BytesIO(contents[name]))
    return buffer.getvalue()


def _parsed(contents: Mapping[str, bytes]) -> Iterator[tuple[str, ast.Module]]:
    for name, content in contents.items():
        if name.endswith(".py"):
            # The handler itself was read before; a broken file beside it may never be imported.
            with contextlib.suppress(HandlerSyntax):
                yield name, parse(content, name)


def _files(folder: Path, include: Collection[str], skip: Collection[Path]) -> dict[str, Path]:
    found = {name: path for name, path in _walk(folder, skip, hidden=False) if name.endswith(".py")}
    for pattern in include:
        if pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
            raise InvalidSpec(f"include pattern {pattern!r} leaves the handler's folder")
        matches = {
            name: path
            for name, path in _walk(folder, skip, hidden=pattern.startswith(".") or "/." in pattern)
            if _matches(name, pattern)
        }
        if not matches:
            raise InvalidSpec(f"include pattern {pattern!r} matches no file in {folder}")
        found.update(matches)
    return dict(sorted(found.items()))


def _matches(name: str, pattern: str) -> bool:
    """`*` stays inside a folder; `**` and a bare folder name take everything below."""
    pattern = pattern.removeprefix("./").rstrip("/")
    if name.startswith(pattern + "/") or ("**" in pattern and fnmatch(name, pattern.replace("**/", "*"))):
        return True
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _walk(folder: Path, skip: Collection[Path], *, hidden: bool) -> Iterator[tuple[str, Path]]:
    """Files below the folder, by their name inside it; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        folders[:] = sorted(name for name in folders if _enters(here / name, skip, hidden=hidden))
        for name in sorted(names):
            path = here / name
            if (hidden or not name.startswith(".")) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _enters(folder: Path, skip: Collection[Path], *, hidden: bool) -> bool:
    return not (
        (folder.name.startswith(".") and not hidden)
        or folder.name in _SKIPPED_FOLDERS
        or (folder / "pyvenv.cfg").exists()
        or folder.resolve() in skip
    )
