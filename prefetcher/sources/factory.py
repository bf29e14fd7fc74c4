"""Opens the source that FS_STORE names. The only module that knows every implementation."""

from __future__ import annotations

from fleetstart.runtime.contract.store_url import S3Url, parse_store

from .base import Source
from .folder import FolderSource
from .http_settings import HttpSettings
from .s3 import S3Source


def open_source(url: str, http: HttpSettings | None = None) -> Source:
    """A source over a folder, or over `s3://bucket/prefix`. Errors: InvalidInput."""
    store = parse_store(url)
    if isinstance(store, S3Url):
        return S3Source(bucket=store.bucket, prefix=store.prefix, http_settings=http)
    return FolderSource(store)
