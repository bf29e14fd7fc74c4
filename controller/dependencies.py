"""Opens what the configuration names: the object store, the cipher of secrets, the collector of spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetstart.runtime.contract.process.environment import ConfigError
from fleetstart.runtime.contract.store_url import S3Url, parse_store

from .auth.secret_encryption import SecretCipher, SecretCipherError
from .config import Config
from .storage.object_store import ObjectStore

if TYPE_CHECKING:
    from .observability.otlp import TraceExport


def open_store(url: str) -> ObjectStore:
    """Opens the object store."""
    where = parse_store(url)
    if isinstance(where, S3Url):
        from .storage.s3_store import S3Store

        return S3Store(where.bucket, where.prefix)
    from .storage.folder_store import FolderStore

    return FolderStore(where)


def open_secret_cipher(config: Config) -> SecretCipher:
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
