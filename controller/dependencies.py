"""Opens what the configuration names: the object store, the vault of secrets, the collector of spans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .auth.secret_encryption import SecretCipher, SecretCipherError
from .config import Config, ConfigError
from .storage.object_store import ObjectStore

if TYPE_CHECKING:
    from .observability.otlp import TraceExport


def open_store(where: str) -> ObjectStore:
    if where.startswith("s3://"):
        from .storage.s3_store import S3Store

        bucket, _, prefix = where.removeprefix("s3://").partition("/")
        return S3Store(bucket, prefix)
    from .storage.folder_store import FolderStore

    return FolderStore(Path(where))


def open_vault(config: Config) -> SecretCipher:
    """Errors: ConfigError."""
    try:
        return SecretCipher(config.home, config.master_key)
    except SecretCipherError as error:
        raise ConfigError(f"{error.message}; {error.hint}") from error


def open_traces(endpoint: str) -> TraceExport | None:
    """Errors: ConfigError if it cannot be had."""
    if not endpoint:
        return None
    try:
        from .observability.otlp import TraceExport  # late: nobody else pays for it
    except ImportError as error:
        raise ConfigError(
            f"spans shall go to {endpoint}, and {error.name} is not installed: pip install 'fleetstart[otel]'"
        ) from error
    return TraceExport(endpoint)
