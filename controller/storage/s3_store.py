"""The object store in S3: one PUT for a small object, else a multipart upload that is completed if its digest
matches. Objects are written once: by `If-None-Match: *`, and by a look before, for servers that do not know it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fleetstart.runtime.contract.errors import StoreFailed, TooLarge
from fleetstart.runtime.contract.object_keys import RELAY

from .object_store import StoredObject, Upload, is_same, not_found

PART_BYTES = 16 << 20
"""10,000 parts are allowed: 160 GB an object; S3 asks for 5 MiB at least."""
READ_BYTES = 1 << 20


class S3Store:
    """`ObjectStore` in a bucket, under a prefix."""

    def __init__(self, bucket: str, prefix: str, *, attempts: int = 3) -> None:
        import boto3  # late: it takes 0.3 s, and a folder store never needs it
        from botocore.config import Config

        self._client: Any = boto3.client(
            "s3",
            config=Config(connect_timeout=5, read_timeout=60, retries={"max_attempts": attempts, "mode": "standard"}),
        )
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    async def put(self, key: str, upload: Upload) -> bool:
        if await self.size(key) is not None:
            async for _ in upload.blocks(PART_BYTES):
                pass
            upload.check()
        elif await self._put_new(key, upload):
            return True
        if not await is_same(self, key, upload):
            await self.delete(key)
            raise StoreFailed(f"{key} was damaged in the store, and has been removed", hint="send it again")
        return False

    async def _put_new(self, key: str, upload: Upload) -> bool:
        """False if there is an object by now."""
        blocks = upload.blocks(PART_BYTES)
        first = await anext(blocks, b"")
        if len(first) < PART_BYTES:
            upload.check()
            return await self._publish(key, self._client.put_object, Body=first)
        begun = await self._call(key, self._client.create_multipart_upload)
        upload_id = begun["UploadId"]
        try:
            parts = [await self._part(key, upload_id, 1, first)]
            async for block in blocks:
                parts.append(await self._part(key, upload_id, len(parts) + 1, block))
            upload.check()
            published = await self._publish(
                key, self._client.complete_multipart_upload, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            await self._abort(key, upload_id)
            raise
        if not published:
            await self._abort(key, upload_id)
        return published

    async def _abort(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(StoreFailed):
            await asyncio.shield(self._call(key, self._client.abort_multipart_upload, UploadId=upload_id))

    async def _publish(self, key: str, method: Callable[..., Any], **arguments: Any) -> bool:
        """Sends a request that makes an object, unless there is one: then False. A server that knows no conditions
        ignores this one, or refuses it, and is asked without."""
        try:
            await self._call(key, method, IfNoneMatch="*", **arguments)
        except StoreFailed as error:
            code = _code_in(error)
            if code in ("PreconditionFailed", "412"):
                return False
            if code not in ("NotImplemented", "501"):
                raise
            await self._call(key, method, **arguments)
        return True

    async def _part(self, key: str, upload_id: str, number: int, block: bytes) -> dict[str, Any]:
        answer = await self._call(key, self._client.upload_part, UploadId=upload_id, PartNumber=number, Body=block)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    async def create(self, key: str, data: bytes) -> bool:
        """Creates an object by `If-None-Match: *`. A server without support overwrites: check before relying on it."""
        return await self._publish(key, self._client.put_object, Body=data)

    async def size(self, key: str) -> int | None:
        try:
            answer = await self._call(key, self._client.head_object, absent=True)
        except StoreFailed as error:
            if _is_bare(error):  # the answer to a HEAD has no body that says why: that of a GET has
                await self._call(key, self._client.get_object, absent=True, Range="bytes=0-0")
            raise
        return int(answer["ContentLength"]) if answer is not None else None

    async def read(self, key: str, limit_bytes: int) -> bytes | None:
        answer = await self._call(key, self._client.get_object, absent=True)
        if answer is None:
            return None
        if answer["ContentLength"] > limit_bytes:
            answer["Body"].close()
            raise TooLarge(f"{key} has {answer['ContentLength']} bytes, {limit_bytes} at most")
        return bytes(await self._thread(key, answer["Body"].read))

    async def read_range(self, key: str, offset: int, size_bytes: int) -> AsyncGenerator[bytes, None]:
        if size_bytes == 0:  # HTTP has no such range
            return
        wanted = f"bytes={offset}-{offset + size_bytes - 1}"
        answer = await self._call(key, self._client.get_object, absent=True, Range=wanted)
        if answer is None:
            raise not_found(key)
        body = answer["Body"]
        try:
            while block := await self._thread(key, lambda: body.read(READ_BYTES)):
                yield block
        finally:
            body.close()

    async def list(self, prefix: str) -> list[StoredObject]:
        def pages() -> list[StoredObject]:
            paginator = self._client.get_paginator("list_objects_v2")
            return [
                StoredObject(
                    key=row["Key"].removeprefix(self._prefix),
                    size_bytes=row["Size"],
                    modified_unix_ms=round(row["LastModified"].timestamp() * 1000),
                )
                for page in paginator.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
                for row in page.get("Contents", ())
            ]

        found: list[StoredObject] = await self._thread(prefix, pages)
        return sorted(found, key=lambda stored: stored.key)

    async def delete(self, key: str) -> None:
        await self._call(key, self._client.delete_object, absent=True)

    async def sweep(self, older_than_s: float) -> int:
        """Parts of an incomplete multipart upload are billed by the store until it is aborted; what nodes send to
        each other through the store (`relay/`) stays if both ends were killed. Neither lives for long."""
        stale = [one for one in await self.list(RELAY) if time.time() - one.modified_unix_ms / 1000 > older_than_s]
        for one in stale:
            await self.delete(one.key)

        def abort() -> int:
            swept = 0
            paginator = self._client.get_paginator("list_multipart_uploads")
            for page in paginator.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for row in page.get("Uploads", ()):
                    if time.time() - row["Initiated"].timestamp() > older_than_s:
                        self._client.abort_multipart_upload(
                            Bucket=self._bucket, Key=row["Key"], UploadId=row["UploadId"]
                        )
                        swept += 1
            return swept

        try:
            swept: int = await self._thread(self._prefix, abort)
        except StoreFailed as error:
            if "NotImplemented" in error.message:  # such servers forget their uploads themselves, or never
                return len(stale)
            raise
        return swept + len(stale)

    async def _call(self, key: str, method: Callable[..., Any], *, absent: bool = False, **arguments: Any) -> Any:
        """Sends a request; with `absent`, None instead of an error if there is no such object."""

        def call() -> Any:
            return method(Bucket=self._bucket, Key=self._prefix + key, **arguments)

        return await self._thread(key, call, absent=absent)

    async def _thread(self, key: str, call: Callable[[], Any], *, absent: bool = False) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        from .s3_errors import code_of, store_error

        try:
            return await asyncio.to_thread(call)
        except ClientError as error:
            if absent and code_of(error) in ("404", "NoSuchKey", "NotFound"):
                return None
            raise store_error(key, error) from error
        except BotoCoreError as error:
            raise store_error(key, error) from error


def _is_bare(error: StoreFailed) -> bool:
    """Checks whether all that the store said is a status."""
    return _code_in(error).isdecimal()


def _code_in(error: StoreFailed) -> str:
    """The code that the store gave as the cause; empty if it did not answer."""
    from botocore.exceptions import ClientError

    from .s3_errors import code_of

    return code_of(error.__cause__) if isinstance(error.__cause__, ClientError) else ""
