"""Bodies and answers of the volumes' endpoints."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.function.volume import VolumeVersion
from fleetstart.runtime.contract.ids import LayerId


class NewVolumeVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tree: LayerId
    """sha256 of the manifest of its files, which is in the store with all its parts."""
    base: int
    """Newest version that its maker knew; 0: none. Another one refuses it."""
    new_bytes: int = 0
    """Bytes that were sent for it."""


class VolumeInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Full name: `index` in project `default`, `PROJECT.index` in any other."""
    project: str
    versions: list[VolumeVersion]
    """The oldest first."""
    created_unix_ms: int
    created_by: str
    used_by: list[str]
    """Functions of which a version in service names it."""


class PruneTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep: int
    """How many of the newest versions stay, 1 or more."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    removed: list[VolumeVersion]
    kept_for: dict[str, str]
    """Older versions that stay, by number, each with the function that names it."""
