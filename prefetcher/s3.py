"""An S3 bucket as a source: ranged GETs, read straight into the segment.

boto3 takes a third of a second to import and is therefore imported when the first source is made, and
never where the store is a folder. Credentials and endpoint are boto3's own affair (AWS_* variables,
profile files, instance roles). Retrying is left to `fetch`, which knows what a retry is worth; boto3's
own retries would hide a dead store for a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetstart import native
from fleetstart.prefetcher.sources import Abandoned, ObjectMissing, ObjectShort, SourceError, check_key

PIECE_BYTES = 128 * 1024
"""Between two looks at `stopped`. boto3 copies each piece once: larger ones would be mapped and unmapped each time."""
CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 10
"""Without a single byte. Longest that an abandoned read can hold its memory."""
MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
RANGE_BEYOND_END = frozenset({"InvalidRange", "416"})


class S3Source:
    def __init__(self, *, bucket: str, prefix: str = "", connections: int = 16) -> None:
        import boto3
        from botocore.config import Config as ClientConfig

        self._bucket = bucket
        self._prefix = prefix
        self._client: Any = boto3.session.Session().client(
            "s3",
            config=ClientConfig(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"total_max_attempts": 1},
                max_pool_connections=connections,
                # We check every chunk ourselves; S3's own checksums do not cover ranges.
                response_checksum_validation="when_required",
            ),
        )

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        answer = self._get(key)
        body = answer["Body"]
        try:
            size = int(answer["ContentLength"])
            if size > limit_bytes:
                raise ValueError(f"{key} has {size} bytes, {limit_bytes} at most")
            data = bytearray(size)
            self._fill(key, body, memoryview(data), lambda: False)
            return bytes(data)
        finally:
            body.close()

    def read_range(self, key: str, offset: int, into: memoryview, stopped: Callable[[], bool]) -> int:
        if stopped():
            raise Abandoned(key)
        end = offset + len(into)
        answer = self._get(key, Range=f"bytes={offset}-{end - 1}")
        body = answer["Body"]
        try:
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            if status != 206:
                raise SourceError(f"{key}: the store answered a range request with status {status}, not 206")
            found = int(answer["ContentLength"])
            if found < len(into):
                raise ObjectShort(key, expected_bytes=end, found_bytes=offset + found)
            if found > len(into):
                raise SourceError(f"{key}: {found} bytes came for a range of {len(into)}")
            self._fill(key, body, into, stopped)
        finally:
            body.close()
        return native.xxh64(into)

    def _get(self, key: str, **arguments: str) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        name = f"{self._prefix}/{check_key(key)}" if self._prefix else check_key(key)
        try:
            answer: dict[str, Any] = self._client.get_object(Bucket=self._bucket, Key=name, **arguments)
            return answer
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in MISSING:
                raise ObjectMissing(key) from error
            if code in RANGE_BEYOND_END:
                raise ObjectShort(key, expected_bytes=_range_end(arguments), found_bytes=self._size(name)) from error
            raise SourceError(f"{key}: {error}") from error
        except BotoCoreError as error:
            raise SourceError(f"{key}: {error}") from error

    def _size(self, name: str) -> int:
        """Only for an error's figures: 0 if the store does not even say that."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return int(self._client.head_object(Bucket=self._bucket, Key=name)["ContentLength"])
        except (BotoCoreError, ClientError):
            return 0

    def _fill(self, key: str, body: Any, into: memoryview, stopped: Callable[[], bool]) -> None:
        """Errors: SourceError if the body ends early: its length was promised, so the connection broke."""
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        filled = 0
        try:
            while filled < len(into):
                if stopped():
                    raise Abandoned(key)
                count = body.readinto(into[filled : filled + PIECE_BYTES])
                if not count:
                    raise SourceError(f"{key}: the answer ended after {filled} of {len(into)} bytes")
                filled += count
        except (BotoCoreError, HTTPError, OSError) as error:
            raise SourceError(f"{key}: after {filled} of {len(into)} bytes: {error}") from error


def _range_end(arguments: dict[str, str]) -> int:
    return int(arguments["Range"].rpartition("-")[2]) + 1
