"""Format of an API key: `fs_{id}_{secret}{checksum}`. Pure, but for the random numbers of a new one.

The id finds the key, the secret has 256 bits of chance, so that one SHA-256 is hash enough, and the checksum lets
scanners of leaked text (and us) tell a key from something that looks like one:

    fs_[0-9a-z]{10}_[0-9A-Za-z]{43}[0-9A-Za-z]{6}

The checksum is CRC-32, base 62, of all that stands before it; GitHub's tokens do the same.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zlib
from string import ascii_letters, ascii_lowercase, digits
from typing import NamedTuple

PREFIX = "fs_"
ID_CHARS = 10
SECRET_CHARS = 43
"""62^43 is a little more than 2^256."""
CHECKSUM_CHARS = 6
"""62^6 is a little more than 2^32."""
TEXT_CHARS = len(PREFIX) + ID_CHARS + 1 + SECRET_CHARS + CHECKSUM_CHARS
_BASE62 = digits + ascii_letters
_TEXT = re.compile(rf"fs_([0-9a-z]{{{ID_CHARS}}})_([0-9A-Za-z]{{{SECRET_CHARS}}})[0-9A-Za-z]{{{CHECKSUM_CHARS}}}")


class MalformedKey(ValueError):
    """The text is not an API key. The message gives the reason, and nothing of the text."""


class ParsedKey(NamedTuple):
    """A parsed key: its id, and the hash of its secret."""

    id: str
    sha256: str


class NewKeyText(NamedTuple):
    text: str
    """Shown once, stored nowhere."""
    id: str
    sha256: str


def new_key_text() -> NewKeyText:
    id = "".join(secrets.choice(digits + ascii_lowercase) for _ in range(ID_CHARS))
    secret = "".join(secrets.choice(_BASE62) for _ in range(SECRET_CHARS))
    text = f"{PREFIX}{id}_{secret}"
    return NewKeyText(text + key_checksum(text), id, _hash(secret))


def parse_key(text: str) -> ParsedKey:
    """Parses a key's text and verifies its checksum. Errors: MalformedKey."""
    if not text.startswith(PREFIX):
        raise MalformedKey(f"a key begins with {PREFIX}")
    if len(text) != TEXT_CHARS:
        raise MalformedKey(f"a key has {TEXT_CHARS} characters, this has {len(text)}")
    match = _TEXT.fullmatch(text)
    if match is None or key_checksum(text[:-CHECKSUM_CHARS]) != text[-CHECKSUM_CHARS:]:
        raise MalformedKey("its checksum does not match: a character was changed or lost")
    return ParsedKey(match[1], _hash(match[2]))


def key_checksum(text: str) -> str:
    number, out = zlib.crc32(text.encode()), ""
    for _ in range(CHECKSUM_CHARS):
        number, digit = divmod(number, 62)
        out = _BASE62[digit] + out
    return out


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
