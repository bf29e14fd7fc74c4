"""Writes objects of some megabytes into the store: a folder, or a bucket."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from fleetstart.runtime.contract.store_url import S3Url, parse_store

from ..sources.base import check_key
from ..sources.errors import SourceError
from ..sources.s3_client import open_client


class StoreWriter(Protocol):
    """Thread-safe. Errors: SourceError, after which a retry may help."""

    def put(self, key: str, data: bytes) -> None:
        """Stores an object, whole or not at all. One that exists is replaced by the same bytes."""
        ...


def open_writer(url: str) -> StoreWriter:
    store = parse_store(url)
    return BucketWriter(store.bucket, store.prefix) if isinstance(store, S3Url) else FolderWriter(store)


class FolderWriter:
    """A folder, laid out like a bucket."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, data: bytes) -> None:
        target = self._root / check_key(key)
        incoming = self._root / ".incoming" / secrets.token_hex(16)
        try:
            incoming.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            with incoming.open("xb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            incoming.rename(target)
        except OSError as error:
            raise SourceError(f"{key} cannot be written: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                incoming.unlink()


class BucketWriter:
    """A bucket. Its client is opened with the first object."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client: Any = None

    def put(self, key: str, data: bytes) -> None:
        from botocore.exceptions import BotoCoreError, ClientError  # late, as boto3 itself

        if self._client is None:
            self._client = open_client()
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + check_key(key), Body=data)
        except (BotoCoreError, ClientError) as error:
            raise SourceError(f"{key} cannot be written: {error}") from error
