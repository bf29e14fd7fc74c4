"""Encryption of secrets at rest: AES-256-GCM under a master key that Redis never sees.

The master key is FS_MASTER_KEY (32 bytes in base64; then, separated by commas, older keys for older ciphertexts), or
else a file in FS_HOME that is created with the first secret, readable by its owner alone. Each ciphertext names its
key's id, and is bound to its project and name: moved elsewhere, it does not decrypt. Several controllers need the same
FS_MASTER_KEY.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetstart.runtime.contract.errors import FleetError

from ..state.access_records import SecretRecord, secret_field

KEY_BYTES = 32
NONCE_BYTES = 12
FILE = "master.key"


class SecretCipherError(FleetError):
    """The needed master key is missing, unreadable or another one."""

    code = "vault_closed"


class SecretCipher:
    """Encrypts and decrypts secrets under the master keys of FS_MASTER_KEY or of the home's file."""

    def __init__(self, home: Path, from_env: str) -> None:
        """Errors: SecretCipherError if FS_MASTER_KEY is malformed."""
        self._file = home / FILE
        self._from_env = bool(from_env)
        self._keys = _parsed(from_env, "FS_MASTER_KEY") if from_env else []

    def encrypt(self, project: str, name: str, value: str) -> tuple[str, str]:
        """Encrypts a secret; returns (box, id of the master key). Errors: SecretCipherError."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # late: most systems have no secrets

        key = self._current()
        nonce = os.urandom(NONCE_BYTES)
        box = nonce + AESGCM(key).encrypt(nonce, value.encode(), secret_field(project, name).encode())
        return b64encode(box).decode(), key_id(key)

    def decrypt(self, record: SecretRecord) -> str:
        """Decrypts a secret. Errors: SecretCipherError, never with the value."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._read()
        key = next((key for key in self._keys if key_id(key) == record.master), None)
        if key is None:
            raise SecretCipherError(
                f"secret {record.name} of project {record.project} is encrypted with master key {record.master}, "
                f"and this controller has {', '.join(map(key_id, self._keys)) or 'none'}",
                hint=f"give it the other one in FS_MASTER_KEY, or in {self._file}; or set the secret again",
            )
        try:
            box = b64decode(record.box, validate=True)
            return AESGCM(key).decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], record.field.encode()).decode()
        except (InvalidTag, Base64Error, ValueError) as error:
            raise SecretCipherError(
                f"secret {record.name} of project {record.project} was changed or moved in Redis: it does not decrypt",
                hint=f"set it again: fs secret set {record.name}",
            ) from error

    def add_master_key(self) -> str:
        """Puts a new master key before the others, which stay for older ciphertexts; returns its id. FS_MASTER_KEY is
        not changed: then its first key is the one. Errors: SecretCipherError."""
        if self._from_env:
            return key_id(self._current())
        with self._locked():
            self._read()
            self._write([os.urandom(KEY_BYTES), *self._keys])
            return key_id(self._keys[0])

    def drop_old_keys(self, used: Collection[str] = ()) -> None:
        """Drops all master keys but the current one and those whose ids are `used`."""
        if not self._from_env:
            with self._locked():
                self._read()
                self._write([*self._keys[:1], *(key for key in self._keys[1:] if key_id(key) in used)])

    def knows(self, master: str) -> bool:
        """True if there is a master key of that id still: another controller may have dropped it since it was used."""
        self._read()
        return any(key_id(key) == master for key in self._keys)

    def _current(self) -> bytes:
        self._read()
        if not self._keys:
            with self._locked():
                self._read()
                if not self._keys:
                    self._write([os.urandom(KEY_BYTES)])
        return self._keys[0]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other controllers of the same home from writing the file: a key that one of them replaces unseen would
        take with it what was encrypted under it."""
        home = self._file.parent
        try:
            lock = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SecretCipherError(f"{home} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read(self) -> None:
        """Reads the file again: another controller of the same home may have written it."""
        if self._from_env:
            return
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            self._keys = []
            return
        except OSError as error:
            raise SecretCipherError(f"{self._file} cannot be read: {error.strerror}") from error
        self._keys = _parsed(text, str(self._file))

    def _write(self, keys: list[bytes]) -> None:
        fresh = self._file.with_name(f"{FILE}.{secrets.token_hex(4)}")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(",".join(b64encode(key).decode() for key in keys) + "\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._file)
        except OSError as error:
            raise SecretCipherError(f"the master key cannot be written to {self._file}: {error.strerror}") from error
        self._keys = keys


def key_id(key: bytes) -> str:
    """Short fingerprint of a master key, which reveals nothing of it."""
    return hashlib.sha256(b"fleetstart master key " + key).hexdigest()[:8]


def _parsed(text: str, where: str) -> list[bytes]:
    found = []
    for part in text.strip().split(","):
        try:
            key = b64decode(part.strip(), validate=True)
        except (Base64Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise SecretCipherError(
                f"{where} is no master key: {KEY_BYTES} bytes in base64 are",
                hint="make one: head -c 32 /dev/urandom | base64",
            )
        found.append(key)
    return found
