"""Volumes: named folders of files in the store, with numbered versions that never change.

The files of a version are stored as those of a layer are (`layer`), and its parts are objects named by their digest,
which versions and volumes share. A volume belongs to a project. A new version names the version that it was based on,
and is refused if another one came first (`with_version`).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..errors import Conflict, InvalidInput, InvalidSpec, NotFound
from ..ids import LayerId
from .names import full_name, is_function_name

VERSIONS_MAX = 1000
"""Versions of one volume: all are in its record, which every controller has in memory."""
VOLUMES_MAX = 1000
"""Volumes of all projects, for the same reason."""
OF_FUNCTION_MAX = 16
WRITE = "rw"
VOLUMES_DIR = "/tmp/volumes"
"""Folder of a confined worker's volumes, each below its name."""


class VolumeRef(NamedTuple):
    """A volume as a function's settings name it: `index`, `index@2`, `index:rw`."""

    name: str
    version: int | None = None
    """None: the newest when a worker starts."""
    write: bool = False


def parse_volume(text: str) -> VolumeRef:
    """Parses a volume of a function's settings. Errors: InvalidSpec."""
    rest, colon, mode = text.partition(":")
    name, at, number = rest.partition("@")
    if colon and mode != WRITE:
        raise InvalidSpec(f"volume {text[:80]!r}: {mode[:20]!r} is not a mode", hint=f'write "{name[:80]}:{WRITE}"')
    if at and not (number.isascii() and number.isdecimal() and 0 < int(number[:10]) < 1 << 31):
        raise InvalidSpec(f"volume {text[:80]!r}: {number[:20]!r} is not a version", hint='write "index@2"')
    if at and colon:
        raise InvalidSpec(
            f"volume {text[:80]!r} is fixed to a version, and a commit makes a newer one",
            hint=f'leave out the version: "{name[:80]}:{WRITE}"',
        )
    if not is_function_name(name) or "." in name:
        hint = "a function sees volumes of its own project, by their names without it" if "." in name else NAME_HINT
        raise InvalidSpec(f"volume name {name[:80]!r} is not allowed", hint=hint)
    return VolumeRef(name, int(number) if at else None, bool(colon))


NAME_HINT = "use 1 to 63 of a-z, 0-9 and -, a letter or digit at either end"


def check_volume_name(name: str) -> str:
    """Checks the name of a volume, with or without its project. Errors: InvalidInput."""
    if not is_function_name(name):
        raise InvalidInput(f"volume name {name[:80]!r} is not allowed", hint=NAME_HINT)
    return name


def check_volumes(texts: list[str], *, has_code: bool) -> None:
    """Checks the volumes of a function. Errors: InvalidSpec."""
    if len(texts) > OF_FUNCTION_MAX:
        raise InvalidSpec(f"a function has {OF_FUNCTION_MAX} volumes at most, got {len(texts)}")
    names = [parse_volume(text).name for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSpec(f"volume {name} is named twice")
    if texts and not has_code:
        raise InvalidSpec("an LLM runs no code that could read a volume", hint="leave out volumes")


class VolumeVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a volume."""

    number: int
    tree: LayerId
    """sha256 of the manifest of its files."""
    size_bytes: int
    files: int
    new_bytes: int
    """Bytes that the version before it did not have."""
    created_unix_ms: int
    created_by: str
    """Name of the key that made it, or of the function that committed it."""


class VolumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A volume in Redis."""

    name: str
    project: str
    versions: list[VolumeVersion] = []
    """The oldest first."""
    last: int = 0
    """Newest number that was given; numbers are not reused."""
    created_unix_ms: int
    created_by: str

    @property
    def full_name(self) -> str:
        return volume_name(self.project, self.name)

    @property
    def latest(self) -> VolumeVersion | None:
        return self.versions[-1] if self.versions else None

    def version(self, number: int | None) -> VolumeVersion:
        """A version by number, None: the newest. Errors: NotFound."""
        if number is None:
            if self.latest is None:
                raise NotFound(f"volume {self.name} has no version yet", hint=f"`fs volume put {self.name} FOLDER`")
            return self.latest
        found = next((one for one in self.versions if one.number == number), None)
        if found is None:
            raise NotFound(f"volume {self.name} has no version {number}", hint=f"`fs volume versions {self.name}`")
        return found


def volume_name(project: str, name: str) -> str:
    """The full name of a volume, made as that of a function is: `index` in project `default`, `PROJECT.index` in any
    other."""
    return full_name(name, project)


def with_version(record: VolumeRecord, base: int, version: VolumeVersion) -> VolumeRecord:
    """The record with a version more, which gets the next number. `base`: the newest version that its maker knew, 0 for
    none. Errors: Conflict, if that is not the newest; InvalidInput, if there are too many."""
    newest = record.latest.number if record.latest is not None else 0
    if base != newest:
        raise Conflict(
            f"volume {record.name}: the new version is based on {_shown(base)}, and {_shown(newest)} is the newest",
            hint="another version came first: read the newest, make the change again and commit that",
        )
    if len(record.versions) >= VERSIONS_MAX:
        raise InvalidInput(
            f"volume {record.name} has {VERSIONS_MAX} versions, the maximum",
            hint=f"remove old ones: fs volume prune {record.name} --keep 10",
        )
    added = msgspec.structs.replace(version, number=record.last + 1)
    return msgspec.structs.replace(record, versions=[*record.versions, added], last=added.number)


def _shown(number: int) -> str:
    return f"version {number}" if number else "no version"


class MountedVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a volume that a worker gets."""

    name: str
    number: int
    """0: the volume has no version yet, and the worker gets an empty folder; for a function that may write it."""
    tree: LayerId = LayerId("")
    write: bool = False
    folder: str = ""
    """Folder of its files on the node; set by the node."""


def volume_path(volume: MountedVolume) -> str:
    """Where a confined worker sees a volume; empty if it has no version yet."""
    return f"{VOLUMES_DIR}/{volume.name}" if volume.folder else ""


class Mounts(msgspec.Struct, frozen=True, kw_only=True):
    """The volumes of one worker, chosen when it was ordered."""

    volumes: list[MountedVolume] = []
    error: str = ""
    """Why there are none: the worker's start fails with it."""
