"""Chooses the object store by its URL: a folder, or a bucket in S3."""

from __future__ import annotations

from fleetstart.runtime.contract.store_url import S3Url, parse_store

from .object_store import ObjectStore

S3_ATTEMPTS = 3


def open_store(url: str, *, attempts: int = S3_ATTEMPTS) -> ObjectStore:
    """Opens the object store. `attempts`: how often a request to S3 is sent before it has failed."""
    where = parse_store(url)
    if isinstance(where, S3Url):
        from .s3_store import S3Store  # late: boto3 takes a third of a second

        return S3Store(where.bucket, where.prefix, attempts=attempts)
    from .folder_store import FolderStore

    return FolderStore(where)
