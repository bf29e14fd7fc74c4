"""Source files in S3: headers are read by range, data is streamed, nothing is written to this machine's disk.

boto3 finds credentials, region and endpoint (AWS_* variables, profiles, instance roles). Each read names the ETag under
which the object was listed, so that an object replaced between the two passes is noticed at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, InvalidInput, StoreFailed, WeightsMissing
from fleetstart.runtime.contract.store_url import S3Url, parse_s3

from .local_files import BLOCK_BYTES, SourceFile
from .source import Source, read_folder, read_single

WINDOW_BYTES = 8 * 1024 * 1024
"""Smaller reads come out of windows: a model has hundreds of small tensors, and a request takes as long as a MiB."""
WINDOWS = 16
CONNECTIONS = 24
OBJECTS_MAX = 10_000
"""Most objects in one folder: a prefix with more is not a model's folder."""


def read_s3(url: str) -> Source:
    """Reads a folder or a file at an s3:// URL. Errors: InvalidInput, WeightsMissing, StoreFailed, and those of any
    source."""
    named = parse_s3(url)
    bucket = Bucket(named.bucket)
    if named.path.endswith(".safetensors"):
        return read_single(bucket.object(named.path))
    return read_folder(S3Folder(bucket, named.prefix))


class Bucket:
    """Client of one bucket; several threads use it."""

    def __init__(self, name: str) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise FleetError("boto3 is not installed, and S3 needs it", hint="pip install boto3") from error
        self.name = name
        config = Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"max_attempts": 5, "mode": "standard"},
            max_pool_connections=CONNECTIONS,
        )
        with self.answering("client"):
            self.client: Any = boto3.client("s3", config=config)

    @contextmanager
    def answering(self, what: str) -> Iterator[None]:
        """Turns errors of boto3 into the contract's."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ("PreconditionFailed", "412"):
                raise _changed(what) from error
            if code in ("NoSuchKey", "404", "NotFound", "InvalidRange", "416"):
                raise WeightsMissing(f"{what} does not exist, or no longer") from error
            if code == "NoSuchBucket":
                raise WeightsMissing(f"there is no bucket {self.name!r}") from error
            raise StoreFailed(
                f"{what}: the store answered {code}", hint="AWS_PROFILE, AWS_ENDPOINT_URL and AWS_* keys decide"
            ) from error
        except (BotoCoreError, HTTPError, ValueError) as error:
            hint = "credentials come from AWS_* variables, a profile or the machine's role"
            raise StoreFailed(f"{what}: {error}", hint=hint) from error

    def _url(self, path: str) -> str:
        return str(S3Url(self.name, path))

    def object(self, key: str) -> S3Object:
        with self.answering(self._url(key)):
            answer = self.client.head_object(Bucket=self.name, Key=key)
        return S3Object(self, key, int(answer["ContentLength"]), str(answer["ETag"]))

    def objects(self, prefix: str) -> list[S3Object]:
        """Objects directly below a prefix, which ends with a slash or is empty."""
        found: list[S3Object] = []
        with self.answering(self._url(prefix)):
            paginator = self.client.get_paginator("list_objects_v2")
            for page in paginator.paginate(Bucket=self.name, Prefix=prefix, Delimiter="/"):
                found.extend(S3Object(self, row["Key"], row["Size"], row["ETag"]) for row in page.get("Contents", ()))
                if len(found) > OBJECTS_MAX:
                    raise InvalidInput(
                        f"{self._url(prefix)} has more than {OBJECTS_MAX:,} objects, which is not a model"
                    )
        return found


@dataclass(frozen=True, slots=True)
class S3Folder:
    """Objects below one prefix."""

    bucket: Bucket
    prefix: str

    def __str__(self) -> str:
        return str(S3Url(self.bucket.name, self.prefix))

    def source_files(self) -> dict[str, SourceFile]:
        objects = self.bucket.objects(f"{self.prefix}/" if self.prefix else "")
        found: dict[str, SourceFile] = {one.name: one for one in sorted(objects, key=lambda one: one.key) if one.name}
        if not found:
            raise WeightsMissing(f"{self} has no objects", hint="the prefix is that of a folder with model.safetensors")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class S3Object:
    """One object; small reads come from cached windows."""

    bucket: Bucket
    key: str
    size_bytes: int
    etag: str
    _windows: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def __str__(self) -> str:
        return str(S3Url(self.bucket.name, self.key))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def facts(self) -> tuple[object, ...]:
        return str(self.bucket.client.meta.endpoint_url), str(self), self.size_bytes, self.etag

    def blocks(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        if size_bytes >= WINDOW_BYTES:
            yield from self._streamed(offset, size_bytes)
            return
        end = offset + size_bytes
        while offset < end:
            begin = offset // WINDOW_BYTES * WINDOW_BYTES
            block = self._window(begin)[offset - begin : end - begin]
            if not block:
                raise _changed(str(self))
            offset += len(block)
            yield block

    def _window(self, begin: int) -> bytes:
        with self._lock:
            if begin in self._windows:
                self._windows.move_to_end(begin)
                return self._windows[begin]
        window = b"".join(self._streamed(begin, min(WINDOW_BYTES, self.size_bytes - begin)))
        with self._lock:
            self._windows[begin] = window
            while len(self._windows) > WINDOWS:
                self._windows.popitem(last=False)
        return window

    def _streamed(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """Streams a range; continues with another request where one breaks off."""
        end = offset + size_bytes
        breaks = 0
        while offset < end:
            try:
                for block in self._answered(offset, end):
                    offset += len(block)
                    yield block
            except StoreFailed:
                breaks += 1
                if breaks > 3:
                    raise

    def _answered(self, offset: int, end: int) -> Iterator[bytes]:
        with self.bucket.answering(str(self)):
            answer = self.bucket.client.get_object(
                Bucket=self.bucket.name, Key=self.key, Range=f"bytes={offset}-{end - 1}", IfMatch=self.etag
            )
        body = answer["Body"]
        try:
            # A server that knows no If-Match answers all the same: what it says of the object is compared, too.
            content_range = str(answer.get("ContentRange", ""))
            if answer["ETag"] != self.etag or content_range != f"bytes {offset}-{end - 1}/{self.size_bytes}":
                raise _changed(str(self))
            with self.bucket.answering(str(self)):
                while offset < end:
                    block = body.read(min(BLOCK_BYTES, end - offset))
                    if not block:
                        raise StoreFailed(f"{self}: the answer ended {end - offset:,} bytes early")
                    offset += len(block)
                    yield block
        finally:
            body.close()


def _changed(what: str) -> CheckpointInvalid:
    return CheckpointInvalid(f"{what} changed while it was read", hint="run the same command again")
