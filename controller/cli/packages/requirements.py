"""Finds what a function requires: its setting, or else a lock or a list of requirements beside the handler.

The setting wins. Beside the handler the most exact file wins: `pylock.toml`, `uv.lock`, `requirements.txt`, then a
`pyproject.toml` with dependencies. An empty setting, `requirements=[]`, needs nothing whatever lies there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec

Kind = Literal["list", "pylock", "uv.lock", "pyproject"]
FILES: dict[str, Kind] = {
    "pylock.toml": "pylock",
    "uv.lock": "uv.lock",
    "requirements.txt": "list",
    "pyproject.toml": "pyproject",
}
"""Names of files beside the handler, the one that wins first."""
FILE_MAX_BYTES = 8 * 1024 * 1024
INCLUDES_MAX = 20
_INDEX = re.compile(
    r"^[ \t]*(?:(-i|--index-url|--extra-index-url|-f|--find-links)[ \t=]+(\S+)|(--no-index)[ \t]*$)", re.MULTILINE
)
_INCLUDE = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of a function, as written."""

    kind: Kind
    origin: str
    """Where it is written, for messages: "requirements of greet", or a file's name."""
    folder: Path
    """Folder that relative paths inside belong to."""
    path: Path | None = None
    """The file; None for a setting."""
    text: str
    """Content: lines as of requirements.txt, or that of the file."""
    included: str = ""
    """Content of further files that it depends on."""

    def digest(self, *facts: str) -> str:
        """A key that changes with the requirements and with further facts."""
        data = msgspec.json.encode([self.kind, self.text, self.included, *facts])
        return hashlib.sha256(data).hexdigest()


def find_requirements(setting: Any, attribute: str, folder: Path) -> Requirements | None:
    """The requirements of one function; None if it has none. Errors: InvalidSpec."""
    if setting is None:
        for name in FILES:
            if (folder / name).is_file() and (found := _of_file(folder, name)) is not None:
                return found
        return None
    if isinstance(setting, str) and setting:
        if not (folder / setting).is_file():
            raise InvalidSpec(
                f"requirements={setting!r}: there is no such file in {folder}",
                hint='name a file beside the handler, or list packages: requirements=["scikit-learn==1.7"]',
            )
        return _of_file(folder, setting)
    if not isinstance(setting, list | tuple) or not all(isinstance(one, str) and one.strip() for one in setting):
        raise InvalidSpec(
            f"requirements={setting!r} is no list of packages",
            hint='write requirements=["scikit-learn==1.7"], or the name of a file beside the handler',
        )
    for one in setting:
        if one.lstrip().startswith("-") or "\n" in one:
            raise InvalidSpec(
                f"requirements: {one[:100]!r} is no package", hint="options belong into a requirements.txt beside it"
            )
    if not setting:
        return None
    text = "".join(f"{one.strip()}\n" for one in setting)
    return Requirements(kind="list", origin=f"requirements of {attribute}", folder=folder, text=text)


def _of_file(folder: Path, name: str) -> Requirements | None:
    path = folder / name
    kind = FILES.get(path.name, "pylock" if path.name.startswith("pylock.") else "list")
    text = _read(path)
    included = ""
    if kind == "pyproject" and not _has_dependencies(path, text):
        return None
    if kind == "uv.lock":
        if not (path.parent / "pyproject.toml").is_file():
            raise InvalidSpec(f"{path} needs the pyproject.toml that it locks beside it")
        included = _read(path.parent / "pyproject.toml")
    if kind == "list":
        included = "".join(_included(path, text))
        if not re.search(r"^\s*[^\s#]", text, re.MULTILINE):
            return None
    return Requirements(kind=kind, origin=name, folder=path.parent, path=path, text=text, included=included)


def index_options(needed: Requirements) -> list[str]:
    """Options of a requirements.txt that say where packages are found, as uv takes them. A lock does not keep them."""
    if needed.kind != "list":
        return []
    found = _INDEX.findall(f"{needed.text}\n{needed.included}")
    return [word for words in found for word in words if word]


def _has_dependencies(path: Path, text: str) -> bool:
    import tomllib  # late: most handlers have none

    try:
        project = tomllib.loads(text).get("project", {})
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSpec(f"{path} cannot be read: {error}") from error
    return isinstance(project, dict) and bool(project.get("dependencies"))


def _included(path: Path, text: str) -> Iterable[str]:
    """Contents of the files that a requirements.txt names, and that these name."""
    seen, waiting = {path.resolve()}, [(path.parent, text)]
    while waiting:
        folder, content = waiting.pop()
        for name in _INCLUDE.findall(content):
            other = (folder / name).resolve()
            if other in seen or not other.is_file() or len(seen) > INCLUDES_MAX:
                continue
            seen.add(other)
            waiting.append((other.parent, _read(other)))
            yield waiting[-1][1]


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > FILE_MAX_BYTES:
            raise InvalidSpec(f"{path} has {len(data):,} bytes, {FILE_MAX_BYTES:,} at most")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path} cannot be read: {error}") from error
