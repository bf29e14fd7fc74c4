"""An S3 bucket as a source: ranges, read by plain HTTP straight into the segment, with one copy, the kernel's.

boto3 finds bucket and credentials and signs one URL an object; the bytes bypass it, because its layers take more
than twice the processor time of the sockets below. A range that stalls, or is far slower than others, is requested
again on another connection, from the byte at which it stopped. Retries of a store that fails are left to `fetch`.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from fleetstart.runtime.contract.process.moving_average import MovingAverage

from .base import ObjectRange, check_key
from .errors import ObjectMissing, ObjectSizeMismatch, ReadCancelled, SourceError
from .http_settings import HttpSettings
from .s3_body import RangeProgress, ResponseBody, check_range
from .s3_client import READ_TIMEOUT_S, STALE_ERRORS, URL_LIVES_S, ConnectionPool, open_client

STALL_S = 2.0
"""Timeout without a byte, while another connection may do better."""
LAG_AFTER_S = 1.0
"""Minimum age of a range before it counts as slow."""
LAG_FACTOR = 5
"""A range slower than others by this factor is requested again. Smaller differences are normal in networks."""
MAX_LAGS = 2
"""Further connections for a slow range; after them it is as fast as it gets."""
URL_USED_S = 300.0
"""Reuse of a signed URL. A signature is valid for an hour, if the credentials behind it are."""
MISSING = frozenset({"NoSuchKey", "404", "NotFound"})


class S3Source:
    """A bucket, or a prefix in it."""

    run_bytes = 16 * 1024 * 1024
    """Large enough that a request's round trip and headers are a hundredth of it."""
    threads = 0

    def __init__(self, *, bucket: str, prefix: str = "", http_settings: HttpSettings | None = None) -> None:
        settings = http_settings or HttpSettings()
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = open_client()
        self._connections = ConnectionPool(settings)
        self._throttled = ConnectionPool(settings)
        """Connections with small receive buffers, which the kernel would not enlarge again."""
        for connections in (self._connections, self._throttled):
            weakref.finalize(self, connections.close)
        self._lock = threading.Lock()
        self._urls: dict[str, tuple[str, float]] = {}
        self._typical_bytes_per_s = MovingAverage()
        """Mean rate of one connection."""

    def read_object(self, key: str, limit_bytes: int) -> bytes:
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + check_key(key))
            with answer["Body"] as body:
                if answer["ContentLength"] > limit_bytes:
                    raise ValueError(f"{key} has {answer['ContentLength']} bytes, {limit_bytes} at most")
                return bytes(body.read())
        except ClientError as error:
            if str(error.response.get("Error", {}).get("Code", "")) in MISSING:
                raise ObjectMissing(key) from error
            raise SourceError(f"{key}: {error}") from error
        except (BotoCoreError, HTTPError, OSError) as error:
            raise SourceError(f"{key}: {error}") from error

    def read(self, asked: ObjectRange, stopped: Callable[[], bool]) -> Iterator[int]:
        progress = RangeProgress(asked)
        lags = 0 if asked.throttle is None else MAX_LAGS  # throttled reads are slow on purpose
        while not progress.whole:
            try:
                yield from self._stream(asked, progress, stopped, patient=lags == MAX_LAGS)
            except _SlowConnection:
                lags += 1
            except _StaleConnection:  # discarded; the next one may be new
                continue

    def _stream(
        self, asked: ObjectRange, progress: RangeProgress, stopped: Callable[[], bool], *, patient: bool
    ) -> Iterator[int]:
        """One request for the missing bytes. Raises _SlowConnection if another connection should continue, unless
        `patient`."""
        if stopped():
            raise ReadCancelled(asked.key)
        url = self._url(asked.key)
        connections = self._connections if asked.throttle is None else self._throttled
        connection, new = connections.take(url)
        answer = None
        whole = False
        try:
            answer, sock = self._ask(connection, connections.request_path(url), asked, progress, patient=patient)
            body = ResponseBody(answer, sock, READ_TIMEOUT_S if patient else STALL_S, asked.throttle)
            began_s, begin = time.monotonic(), progress.offset
            while not progress.whole:
                if stopped():
                    raise ReadCancelled(asked.key)
                before = progress.offset
                checksum = progress.fill(body)
                if checksum is not None:
                    yield checksum
                if asked.throttle is not None:
                    asked.throttle.wait(progress.offset - before, stopped)
                if not patient:
                    self._check_rate(progress.offset - begin, time.monotonic() - began_s)
            if asked.throttle is None:
                self._note_rate(progress.offset - begin, time.monotonic() - began_s)
            whole = body.end()
        except EOFError as error:
            raise SourceError(f"{asked.key}: the answer ended after byte {progress.offset}") from error
        except TimeoutError as error:
            if not patient:
                raise _SlowConnection from error
            raise SourceError(f"{asked.key}: no byte after {progress.offset} in {READ_TIMEOUT_S:g} s") from error
        except STALE_ERRORS as error:
            if new:
                raise SourceError(f"{asked.key}: at byte {progress.offset}: {error}") from error
            raise _StaleConnection from error
        except (OSError, http.client.HTTPException) as error:
            what = str(error) or type(error).__name__
            raise SourceError(f"{asked.key}: at byte {progress.offset}: {what}") from error
        finally:
            if whole:
                connections.give_back(url, connection)
            else:
                if answer is not None:
                    answer.close()
                connection.close()

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        asked: ObjectRange,
        progress: RangeProgress,
        *,
        patient: bool,
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Sends the request; the response, once its headers are checked, and the socket that its body comes from."""
        wanted = f"bytes={progress.offset}-{progress.end - 1}"
        connection.request("GET", path, headers={"Range": wanted})
        if asked.throttle is not None:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, asked.throttle.window_bytes)
        # A connection drops its socket with the headers of an answer after which the store closes; the answer keeps it.
        sock: socket.socket = connection.sock
        sock.settimeout(READ_TIMEOUT_S if patient else STALL_S)
        answer = connection.getresponse()
        try:
            self._check(answer, asked, progress)
        except BaseException:
            answer.close()  # it may hold the last reference to the socket
            raise
        return answer, sock

    def _check(self, answer: http.client.HTTPResponse, asked: ObjectRange, progress: RangeProgress) -> None:
        """Checks status and headers. Errors: ObjectMissing, ObjectSizeMismatch, SourceError."""
        if answer.status == 206:
            check_range(asked, progress, answer)
            return
        if answer.status == 404:
            raise ObjectMissing(asked.key)
        if answer.status == 416:
            raise ObjectSizeMismatch(
                asked.key, expected_bytes=asked.object_bytes, found_bytes=self._size(asked.key, answer)
            )
        with self._lock:
            self._urls.pop(asked.key, None)  # the signature may have expired
        raise SourceError(
            f"{asked.key}: the store answered a range request with status {answer.status} {answer.reason}, not 206"
        )

    def _size(self, key: str, answer: http.client.HTTPResponse) -> int:
        """Size of an object that lacks the range: most stores report it with their 416, others are asked."""
        from botocore.exceptions import BotoCoreError, ClientError

        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdecimal():
            return int(total)
        try:
            return int(
                self._client.head_object(Bucket=self._bucket, Key=self._prefix + check_key(key))["ContentLength"]
            )
        except (BotoCoreError, ClientError) as error:
            raise SourceError(f"{key}: {error}") from error

    def _url(self, key: str) -> str:
        from botocore.exceptions import BotoCoreError

        now_s = time.monotonic()
        with self._lock:
            known, until_s = self._urls.get(key, ("", 0.0))
        if now_s < until_s:
            return known
        try:
            url: str = self._client.generate_presigned_url(
                "get_object",
                Params={"Bucket": self._bucket, "Key": self._prefix + check_key(key)},
                ExpiresIn=URL_LIVES_S,
            )
        except BotoCoreError as error:
            raise SourceError(f"{key}: {error}") from error
        with self._lock:
            if len(self._urls) > 10_000:
                self._urls.clear()
            self._urls[key] = (url, now_s + URL_USED_S)
        return url

    def _check_rate(self, size_bytes: int, took_s: float) -> None:
        if took_s > LAG_AFTER_S and size_bytes / took_s * LAG_FACTOR < self._typical_bytes_per_s.value:
            raise _SlowConnection

    def _note_rate(self, size_bytes: int, took_s: float) -> None:
        rate = size_bytes / max(took_s, 1e-6)
        with self._lock:
            self._typical_bytes_per_s = self._typical_bytes_per_s.fold(rate)


class _StaleConnection(Exception):
    """A kept connection that the store has closed meanwhile."""


class _SlowConnection(Exception):
    """A connection much slower than others; another one may do better."""
