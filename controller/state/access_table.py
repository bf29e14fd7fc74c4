"""The access table: keys, projects, secrets and volumes as last read from Redis, for decisions without a round trip.

A table is immutable; a reading that differs makes another. Entries that cannot be decoded (a later version wrote them)
are left out, but still count as keys: an unreadable key does not open access.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fleetstart.runtime.contract.function.volume import VolumeRecord, volume_name
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from .access_records import DEFAULT, Credential, KeyRecord, ProjectRecord, SecretRecord, secret_field

Raw = Mapping[bytes, bytes]
Record = TypeVar("Record", KeyRecord, ProjectRecord, SecretRecord, VolumeRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessTable:
    locked: bool = False
    """True if any key exists, revoked ones included: from then on every request needs one."""
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    by_id: Mapping[str, tuple[KeyRecord, Credential]] = field(default_factory=dict)
    projects: Mapping[str, ProjectRecord] = field(default_factory=dict)
    """Projects that were created or have quotas."""
    secrets: Mapping[str, SecretRecord] = field(default_factory=dict)
    """Secrets by {project}/{name}."""
    volumes: Mapping[str, VolumeRecord] = field(default_factory=dict)
    """Volumes by their full names."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Calls a second by project, where there is such a quota."""
    unreadable: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Errors of the records that cannot be read, by kind and name."""
    raw: tuple[Raw, Raw, Raw, Raw] = field(default=({}, {}, {}, {}), repr=False)

    def has_project(self, name: str) -> bool:
        return name == DEFAULT or name in self.projects

    def secret(self, project: str, name: str) -> SecretRecord | None:
        return self.secrets.get(secret_field(project, name))

    def secret_names(self, project: str) -> list[str]:
        return sorted(record.name for record in self.secrets.values() if record.project == project)

    def volume(self, project: str, name: str) -> VolumeRecord | None:
        return self.volumes.get(volume_name(project, name))

    def volume_names(self, project: str) -> list[str]:
        return sorted(record.full_name for record in self.volumes.values() if record.project == project)


EMPTY = AccessTable()


def read_table(
    raw_keys: Raw, raw_projects: Raw, raw_secrets: Raw, raw_volumes: Raw, last: AccessTable = EMPTY
) -> AccessTable:
    """Decodes the hashes; returns `last` itself if nothing has changed."""
    raw = (raw_keys, raw_projects, raw_secrets, raw_volumes)
    if raw == last.raw:
        return last
    unreadable: dict[str, dict[str, str]] = {"key": {}, "project": {}, "secret": {}, "volume": {}}
    keys = {record.name: record for record in _decoded(raw_keys, _KEY, unreadable["key"])}
    projects = {record.name: record for record in _decoded(raw_projects, _PROJECT, unreadable["project"])}
    return AccessTable(
        locked=bool(raw_keys),
        keys=keys,
        by_id={credential.id: (record, credential) for record in keys.values() for credential in record.credentials},
        projects=projects,
        secrets={record.field: record for record in _decoded(raw_secrets, _SECRET, unreadable["secret"])},
        volumes={record.full_name: record for record in _decoded(raw_volumes, _VOLUME, unreadable["volume"])},
        rates={
            record.name: record.quotas.calls_per_s
            for record in projects.values()
            if record.quotas.calls_per_s is not None
        },
        unreadable=unreadable,
        raw=raw,
    )


_KEY, _PROJECT = RecordDecoder(KeyRecord), RecordDecoder(ProjectRecord)
_SECRET, _VOLUME = RecordDecoder(SecretRecord), RecordDecoder(VolumeRecord)


def _decoded(raw: Raw, decoder: RecordDecoder[Record], problems: dict[str, str]) -> list[Record]:
    found = []
    for field_name, data in raw.items():
        try:
            found.append(decoder.decode(data))
        except UnreadableRecord as error:
            problems[field_name.decode(errors="replace")] = str(error)
    return found
