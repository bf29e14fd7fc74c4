"""Small objects of an S3 bucket, written, read and deleted with as little delay as a store allows.

Plain HTTP on connections that are kept open, as in `sources.s3`, and each request with a deadline of its own: a
store answers one in a thousand late, and a retry is quicker than waiting.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading

from ..sources.base import check_key
from ..sources.errors import ObjectMissing, SourceError
from ..sources.http_settings import HttpSettings
from ..sources.s3_client import STALE_ERRORS, URL_LIVES_S, ConnectionPool, open_client

REQUEST_S = 0.5
"""Timeout of a request: ten times the usual latency of a store."""
SLOWEST_BYTES_PER_S = 1e6
"""Minimum bandwidth, for the time added for a body: a link of 8 Mbit/s, or a share of a better one."""
FAILED_FROM = 500
PASSING = frozenset({408, 425, 429})
"""Client errors that a retry may cure."""
REASON_MOST = 200


class StoreRejection(Exception):
    """The store rejected the request; a retry does not help."""


class RelayStore:
    """Objects of a bucket. Thread-safe. Keys are relative, `/`-separated.

    Errors: SourceError, after which a retry may help; StoreRejection.
    """

    def __init__(self, bucket: str, prefix: str, http_settings: HttpSettings) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = open_client()
        self._connections = ConnectionPool(http_settings)
        self._lock = threading.Lock()
        self._urls: dict[tuple[str, str], str] = {}
        """Signed URLs of objects that did not exist yet, and will be requested again."""

    def put(self, key: str, data: bytes) -> None:
        status, answer = self._ask("PUT", "put_object", key, data)
        if status != 200:
            raise _error(f"{key} could not be written", status, answer)

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        """None if the object does not exist. StoreRejection also if it is larger than the limit."""
        status, answer = self._ask("GET", "get_object", key, limit_bytes=limit_bytes)
        if status == 404:
            return None
        if status != 200:
            raise _error(f"{key} could not be read", status, answer)
        if len(answer) > limit_bytes:
            raise StoreRejection(f"{key} has more than {limit_bytes:,} bytes")
        return answer

    def exists(self, key: str) -> bool:
        status, answer = self._ask("HEAD", "head_object", key)
        if status not in (200, 404):
            raise _error(f"{key} could not be looked at", status, answer)
        return status == 200

    def delete(self, key: str) -> None:
        """Deletes an object; a missing one is no error."""
        status, answer = self._ask("DELETE", "delete_object", key)
        if status not in (200, 204, 404):
            raise _error(f"{key} could not be deleted", status, answer)

    def keys(self, folder: str) -> list[str]:
        """Keys of all objects below a prefix that ends with a slash."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            check_key(folder.rstrip("/"))
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + folder
            )
            return [str(row["Key"]).removeprefix(self._prefix) for page in pages for row in page.get("Contents", ())]
        except (BotoCoreError, ClientError) as error:
            raise SourceError(f"{folder}: {error}") from error
        except ObjectMissing as error:
            raise StoreRejection(f"{folder}: {error}") from error

    def close(self) -> None:
        self._connections.close()
        self._client.close()

    def _ask(
        self, method: str, operation: str, key: str, body: bytes | None = None, *, limit_bytes: int = REASON_MOST
    ) -> tuple[int, bytes]:
        """Status and body of a response; reads at most one byte beyond the limit."""
        url = self._url(operation, key)
        timeout_s = REQUEST_S + (len(body) if body else limit_bytes) / SLOWEST_BYTES_PER_S
        while True:
            connection, new = self._connections.take(url)
            try:
                answer = self._exchange(connection, method, url, body, timeout_s)
                data = answer.read(limit_bytes + 1)
            except STALE_ERRORS as error:
                connection.close()
                if new:
                    raise SourceError(f"{key}: {type(error).__name__}: {error}") from error
                continue  # a kept connection that the store has closed
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                late = f"no answer in {timeout_s:.1f} s" if isinstance(error, TimeoutError) else str(error)
                raise SourceError(f"{key}: {late or type(error).__name__}") from error
            except BaseException:
                connection.close()
                raise
            if answer.isclosed() and not answer.will_close:  # all of it was read
                self._connections.give_back(url, connection)
            else:
                connection.close()
            self._keep(operation, key, url if answer.status == 404 or method == "HEAD" else "")
            return answer.status, data

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> http.client.HTTPResponse:
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        connection.request(method, self._connections.request_path(url), body=body)
        # A store that answers in two parts sends the second once the first is acknowledged, for which the kernel would
        # take its time.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return connection.getresponse()

    def _url(self, operation: str, key: str) -> str:
        from botocore.exceptions import BotoCoreError

        with self._lock:
            known = self._urls.pop((operation, key), "")
        if known:
            return known
        try:
            return str(
                self._client.generate_presigned_url(
                    operation,
                    Params={"Bucket": self._bucket, "Key": self._prefix + check_key(key)},
                    ExpiresIn=URL_LIVES_S,
                )
            )
        except (BotoCoreError, ObjectMissing) as error:  # no credentials; a key that leads out of the store
            raise StoreRejection(f"{key}: {error}") from error

    def _keep(self, operation: str, key: str, url: str) -> None:
        with self._lock:
            if url:
                if len(self._urls) > 1000:
                    self._urls.clear()
                self._urls[operation, key] = url


def _error(what: str, status: int, answer: bytes) -> Exception:
    reason = answer.decode(errors="replace").strip()
    with contextlib.suppress(IndexError):  # an S3 error says what it is in its <Code>
        reason = reason.split("<Code>")[1].split("</Code>")[0]
    said = f"{what}: the store answered {status}" + (f" {reason[:REASON_MOST]}" if reason else "")
    return SourceError(said) if status >= FAILED_FROM or status in PASSING else StoreRejection(said)
