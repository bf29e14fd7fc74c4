"""Errors of reads from a source.

ReadError
├── SourceError            the store failed or answered wrongly: a retry may help
│   └── SourceLost         it delivers nothing more: a peer that refuses, or breaks the protocol
├── ObjectMissing          the store has no such object
├── ObjectSizeMismatch     the object's size differs from its manifest
└── ReadCancelled          the reader was told to stop

`fetch/errors.py` turns them into the FleetError that a caller sees.
"""

from __future__ import annotations


class ReadError(Exception):
    """A read from a source has failed."""


class SourceError(ReadError):
    """The store failed or answered wrongly; a retry may help."""


class SourceLost(SourceError):
    """The source will deliver nothing more."""


class ObjectMissing(ReadError):
    """The store has no such object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is not in the store")
        self.key = key


class ObjectSizeMismatch(ReadError):
    """The object's size differs from its manifest: it was truncated or replaced."""

    def __init__(self, key: str, *, expected_bytes: int, found_bytes: int) -> None:
        super().__init__(f"{key} has {found_bytes} bytes, {expected_bytes} expected")
        self.key = key
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes


class ReadCancelled(ReadError):
    """The reader was told to stop."""
