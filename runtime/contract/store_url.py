"""The URL of an object store, `s3://bucket/prefix` or a folder, and of an object or a folder in S3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import InvalidInput

S3_SCHEME = "s3://"
FILE_SCHEME = "file://"


@dataclass(frozen=True, slots=True)
class S3Url:
    """A bucket, and a path in it: the key of an object, or the prefix of many."""

    bucket: str
    path: str = ""
    """The rest of the URL as it was written, without the slash that follows the bucket."""

    @property
    def prefix(self) -> str:
        """The path without slashes at its ends."""
        return self.path.strip("/")

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.path}" if self.path else f"{S3_SCHEME}{self.bucket}"


def is_s3(text: str) -> bool:
    """Checks whether the text is an S3 URL, and not a folder of this machine."""
    return text.startswith(S3_SCHEME)


def parse_s3(text: str) -> S3Url:
    """Parses an S3 URL. Errors: InvalidInput."""
    bucket, _, path = text.removeprefix(S3_SCHEME).partition("/")
    if not is_s3(text) or not bucket:
        raise InvalidInput(f"{text!r} names no bucket", hint="write s3://bucket/prefix")
    return S3Url(bucket, path)


def parse_store(text: str) -> S3Url | Path:
    """Parses the setting FS_STORE: an S3 URL, a path, or a file:// URL. Errors: InvalidInput."""
    return parse_s3(text) if is_s3(text) else Path(text.removeprefix(FILE_SCHEME))
