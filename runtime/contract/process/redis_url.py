"""URLs of Redis with TLS: the file of the certificates that Redis' own is checked by travels in the URL.

`ssl_ca_certs` in a URL's query is redis-py's own. So a URL is all that a client needs, and FS_REDIS_CA is read once.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from .environment import ConfigError

PARAMETER = "ssl_ca_certs"


def with_ca(url: str, ca: str) -> str:
    """The URL of a Redis whose certificate is checked by those in the file `ca`; empty: by those that the machine
    trusts. A URL that names a file keeps it. Errors: ConfigError."""
    if not ca:
        return url
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        raise ConfigError(f"FS_REDIS_CA={ca} is for a Redis with TLS: its URL begins with rediss://")
    read_ca(ca)
    query = parse_qsl(parts.query, keep_blank_values=True)
    if any(name == PARAMETER for name, _ in query):
        return url
    return urlunsplit(parts._replace(query=urlencode([*query, (PARAMETER, ca)])))


def split_ca(url: str) -> tuple[str, str]:
    """The URL without its file, and the file; empty if it names none."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    ca = next((value for name, value in query if name == PARAMETER), "")
    rest = [(name, value) for name, value in query if name != PARAMETER]
    return (urlunsplit(parts._replace(query=urlencode(rest))), ca) if ca else (url, "")


def read_ca(path: str) -> str:
    """The text of the file. Errors: ConfigError."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"FS_REDIS_CA={path} cannot be read: {error}") from error
    if "BEGIN CERTIFICATE" not in text:
        raise ConfigError(f"FS_REDIS_CA={path} has no certificate: PEM begins with -----BEGIN CERTIFICATE-----")
    return text
