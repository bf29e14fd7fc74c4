"""The owner's key file: reads and writes FS_HOME/key, the admin key that the local `fs` sends.

The owner of the home owns the system: its Redis, its store, its master key. So the key is an admin's.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..state.access_records import LOCAL, Credential, KeyRecord
from .api_key import MalformedKey, ParsedKey, new_key_text, parse_key

FILE = "key"
NAME = "admin"
"""Name of the first key."""


def read_key_file(path: Path) -> str:
    """Returns the file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def write_key_file(path: Path, text: str) -> None:
    """Writes the key, atomically replacing the one before it. Errors: OSError."""
    fresh = _written_beside(path, text)
    fresh.replace(path)


def load_or_create(path: Path) -> ParsedKey:
    """Reads the home's key, creating it if needed; concurrent processes get the same key. Errors: OSError."""
    with suppress(MalformedKey):
        return parse_key(read_key_file(path))
    _remove_damaged(path)
    fresh = _written_beside(path, new_key_text().text)
    try:
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
    try:
        return parse_key(read_key_file(path))
    except MalformedKey as error:
        raise OSError(f"{path} reads back differently from what was written") from error


def _remove_damaged(path: Path) -> None:
    """Removes a file that holds no key, as a full disk leaves it. What another process wrote meanwhile stays: its key
    may be registered already. Errors: OSError for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        try:
            with suppress(MalformedKey, FileExistsError):
                parse_key(read_key_file(aside))
                os.link(aside, path)
        finally:
            aside.unlink()


def owner_key_record(shown: ParsedKey, name: str, now_unix_ms: int) -> KeyRecord:
    """Builds the record of the owner's key: admin, unlimited, without expiry."""
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
