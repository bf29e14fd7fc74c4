"""The key that a home keeps for its owner: one file, for its user alone. The local `fs` shows it.

Whoever owns the home owns the system: its Redis, its store, its master key. So the key is an admin's.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..state.access_records import LOCAL, Credential, KeyRecord
from .api_key import MalformedKey, ParsedKey, new_key_text, parse_key

FILE = "key"
NAME = "admin"
"""Of the first key."""


def read_key_file(path: Path) -> str:
    """What the file says; empty: there is none that can be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def write_key_file(path: Path, text: str) -> None:
    """In place of the one before it, if there is one. Errors: OSError."""
    fresh = _written_beside(path, text)
    fresh.replace(path)


def load_or_create(path: Path) -> ParsedKey:
    """Several processes that have one home get one key. Errors: OSError."""
    with suppress(MalformedKey):
        return parse_key(read_key_file(path))
    path.unlink(missing_ok=True)  # damaged, or empty as a full disk leaves it
    fresh = _written_beside(path, new_key_text().text)
    try:
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
    try:
        return parse_key(read_key_file(path))
    except MalformedKey as error:
        raise OSError(f"{path} does not keep what is written to it") from error


def owner_key_record(shown: ParsedKey, name: str, now_unix_ms: int) -> KeyRecord:
    """An admin's, for everything, without an end."""
    credential = Credential(id=shown.id, sha256=shown.sha256, created_unix_ms=now_unix_ms)
    return KeyRecord(
        name=name, rights=["admin"], credentials=[credential], created_unix_ms=now_unix_ms, created_by=LOCAL
    )


def _written_beside(path: Path, text: str) -> Path:
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    return fresh
