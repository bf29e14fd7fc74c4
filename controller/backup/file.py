"""The file of a backup: gzip of lines of JSON.

    {"format": "fleetstart-backup", "version": 1, "schema": 1, ...}      the header
    ["fs:functions", "hello", "{...}"]                                  a record: key, field, value
    ["fs:keys", "odd", "/w==", "base64"]                                one whose value is no text
    {"records": 2, "sha256": "..."}                                     of all bytes before this line

A file is read whole and checked whole before anything of it is used. The checksum finds accidents, not forgeries: who
may restore a backup may write anything into Redis anyway.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError

from ..state.redis_server.schema import SCHEMA
from .tables import State, table_of

FORMAT = "fleetstart-backup"
VERSION = 1
"""Version of the file's format."""
BYTES_MAX = 4 << 30
"""Unpacked size that is read at most: a small file may unpack to any size, and all of it is held in memory."""
LINE_MAX = 64 << 20
"""Longest line: a version with its settings has some KiB, a volume with a thousand versions some hundred."""


class BackupInvalid(FleetError):
    """The file is no backup, is damaged, or was written by a later release."""

    code = "backup_invalid"


class BackupHeader(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    version: int = VERSION
    schema: int = SCHEMA
    created_unix_ms: int
    release: str
    """Release of fleetstart that made it."""
    masters: list[str] = []
    """Ids of the master keys that its secrets are encrypted with. The keys are not in the file."""


class _End(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    records: int
    sha256: str


def pack(header: BackupHeader, state: State) -> bytes:
    """The bytes of a file."""
    out = io.BytesIO()
    sha256 = hashlib.sha256()
    records = 0
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0) as file:
        for line in _lines(header, state):
            sha256.update(line)
            file.write(line)
            records += 1
        file.write(msgspec.json.encode(_End(records=records - 1, sha256=sha256.hexdigest())) + b"\n")
    return out.getvalue()


def _lines(header: BackupHeader, state: State) -> Iterator[bytes]:
    yield msgspec.json.encode(header) + b"\n"
    for key in sorted(state):
        for field, value in state[key].items():
            try:
                line: list[str] = [key, field, value.decode()]
            except UnicodeDecodeError:
                line = [key, field, b64encode(value).decode(), "base64"]
            yield msgspec.json.encode(line) + b"\n"


def write(path: Path, data: bytes) -> None:
    """Writes the file for its owner alone, whole or not at all, and on the disk when this returns. Errors: OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> tuple[BackupHeader, State]:
    """Reads and checks a file. Errors: BackupInvalid, OSError."""
    return unpack(path.read_bytes(), str(path))


def unpack(data: bytes, name: str = "the file") -> tuple[BackupHeader, State]:
    """Errors: BackupInvalid."""
    sha256 = hashlib.sha256()
    header: BackupHeader | None = None
    state: State = {}
    records = 0
    lines = _unpacked(data, name)
    for line in lines:
        if header is None:
            header = _header(line, name)
        elif line.startswith(b"{"):
            _check_end(line, name, records, sha256.hexdigest())
            if next(lines, None) is not None:  # gzip's own checksum is read with its end
                raise BackupInvalid(f"{name} goes on behind its last line", hint=_ANOTHER)
            return header, state
        else:
            _add(state, line, name, records + 1)
            records += 1
        sha256.update(line)
    raise BackupInvalid(f"{name} ends after {records:,} records without its checksum", hint=_ANOTHER)


_ANOTHER = "it was cut off or changed: take another copy, or another backup"


def _unpacked(data: bytes, name: str) -> Iterator[bytes]:
    left = BYTES_MAX
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while line := file.readline(LINE_MAX + 1):
                left -= len(line)
                if len(line) > LINE_MAX or left < 0:
                    raise BackupInvalid(f"{name} unpacks to more than a backup can have ({BYTES_MAX:,} bytes)")
                if not line.endswith(b"\n"):
                    raise BackupInvalid(f"{name} ends within a line", hint=_ANOTHER)
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise BackupInvalid(f"{name} is damaged, or no backup: {error}", hint=_ANOTHER) from error


def _header(line: bytes, name: str) -> BackupHeader:
    try:
        header = msgspec.json.decode(line, type=BackupHeader)
    except UNDECODABLE as error:
        raise BackupInvalid(f"{name} is no backup: {error}", hint="`fs backup FILE` writes one") from error
    if header.format != FORMAT:
        raise BackupInvalid(f"{name} is no backup: its format is {header.format[:40]!r}")
    if (header.version, header.schema) > (VERSION, SCHEMA) or header.schema > SCHEMA:
        raise BackupInvalid(
            f"{name} was written by a later release ({header.release[:40]}): format {header.version}, schema "
            f"{header.schema}; this release reads up to {VERSION} and {SCHEMA}",
            hint="restore it with that release",
        )
    return header


def _add(state: State, line: bytes, name: str, number: int) -> None:
    try:
        key, field, text, *coding = msgspec.json.decode(line, type=list[str])
        if coding not in ([], ["base64"]):
            raise ValueError(f"its coding is {coding}")
        value = b64decode(text, validate=True) if coding else text.encode()
    except (msgspec.MsgspecError, ValueError, Base64Error, RecursionError) as error:
        raise BackupInvalid(f"{name}: record {number:,} is not understood: {error}", hint=_ANOTHER) from error
    if table_of(key) is None:
        raise BackupInvalid(f"{name}: record {number:,} is of {key[:80]!r}, which belongs to no backup")
    fields = state.setdefault(key, {})
    if field in fields:
        raise BackupInvalid(f"{name}: record {number:,} stands there twice: {key} {field[:80]}")
    fields[field] = value


def _check_end(line: bytes, name: str, records: int, sha256: str) -> None:
    try:
        end = msgspec.json.decode(line, type=_End)
    except UNDECODABLE as error:
        raise BackupInvalid(f"{name}: its last line is not understood: {error}", hint=_ANOTHER) from error
    if (end.records, end.sha256) != (records, sha256):
        raise BackupInvalid(
            f"{name}: {records:,} records with checksum {sha256[:12]}, its last line says {end.records:,} and "
            f"{end.sha256[:12]}",
            hint=_ANOTHER,
        )
