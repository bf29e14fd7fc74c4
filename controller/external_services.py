"""Opens the external dependencies of the configuration: encryption of secrets, export of spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetstart.runtime.contract.process.environment import ConfigError

from .auth.secret_encryption import SecretCipher, SecretCipherError
from .config import Config

if TYPE_CHECKING:
    from .observability.otlp import TraceExport


def open_secret_cipher(config: Config) -> SecretCipher:
    """Opens the encryption of secrets. Errors: ConfigError."""
    try:
        return SecretCipher(config.home, config.master_key)
    except SecretCipherError as error:
        raise ConfigError(f"{error.message}; {error.hint}") from error


def open_traces(endpoint: str) -> TraceExport | None:
    """Opens the export of spans, if there is an endpoint. Errors: ConfigError if it is not installed."""
    if not endpoint:
        return None
    try:
        from .observability.otlp import TraceExport  # late: only those who use it pay for the import
    except ImportError as error:
        raise ConfigError(
            f"spans are to be sent to {endpoint}, but {error.name} is not installed: pip install 'fleetstart[otel]'"
        ) from error
    return TraceExport(endpoint)
