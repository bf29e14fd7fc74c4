"""Opens the source that FS_STORE names. The only module that knows every implementation."""

from __future__ import annotations

from pathlib import Path

from .base import FileSource, Source
from .s3 import S3Source


def open_source(url: str) -> Source:
    """A source over a folder, or over `s3://bucket/prefix`."""
    if url.startswith("s3://"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        return S3Source(bucket=bucket, prefix=prefix.strip("/"))
    return FileSource(Path(url.removeprefix("file://")))
