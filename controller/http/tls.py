"""TLS of listening sockets: the context of a certificate and its key, with errors that name the file."""

from __future__ import annotations

import ssl

from fleetstart.runtime.contract.process.environment import ConfigError


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Context of a server, from PEM files: the certificate with its chain, and its key. Errors: ConfigError."""
    for what, path in (("certificate", certificate), ("key", key)):
        _require_readable(what, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    asked = False

    def no_passphrase() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if asked:
            reason = f"the key {key} is encrypted, and a server cannot ask for its passphrase"
        elif error.reason == "KEY_VALUES_MISMATCH":
            reason = f"the key {key} is not that of the certificate {certificate}"
        else:
            reason = f"{certificate} and {key} must be PEM files with a certificate and its key"
        raise ConfigError(f"TLS: {reason}") from error
    return context


def _require_readable(what: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"TLS: the {what} {path} cannot be read: {error.strerror}") from error
