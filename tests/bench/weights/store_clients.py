"""Clients of an object store that fill memory of ours, 8 MiB ranges at a time: the ceiling, and boto3 twice.

The raw reader is what HTTP can be at best: a socket a thread, one request a range, MSG_WAITALL into the memory. All
take ranges from one shared counter and verify nothing. Each runs in a fresh process, which begins with memory made and
touched; connections are its own affair, and part of its time. Run by `loaders.module`, never by hand.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.bench.harness.caches import prefaulted

RANGE_BYTES = 8 << 20
THREADS = 4
HEAD_MAX = 4096

Object = tuple[str, int, int]
"""Key, size, where it begins in memory."""
Fill = Callable[[memoryview, list[Object]], None]


def raw_sockets(url: str, bucket: str, _: str) -> Fill:
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    address = (place.hostname, place.port)

    def run(memory: memoryview, take: Callable[[], tuple[str, int, int, int] | None]) -> None:
        with socket.create_connection(address) as link:
            while (wanted := take()) is not None:
                key, first, size, at = wanted
                link.sendall(
                    f"GET /{bucket}/{key} HTTP/1.1\r\nHost: {place.netloc}\r\n"
                    f"Range: bytes={first}-{first + size - 1}\r\n\r\n".encode()
                )
                head = link.recv(HEAD_MAX)
                while (end := head.find(b"\r\n\r\n")) < 0:
                    head += link.recv(HEAD_MAX)
                if b" 206 " not in head[:16]:
                    raise OSError(f"the store answered {head[:60]!r}")
                begun = head[end + 4 :]
                memory[at : at + len(begun)] = begun
                got = len(begun)
                while got < size:
                    count = link.recv_into(memory[at + got : at + size], size - got, socket.MSG_WAITALL)
                    if not count:
                        raise OSError("the store closed the connection")
                    got += count

    return lambda memory, objects: _in_threads(run, memory, objects)


def boto3_get_object(url: str, bucket: str, key: str) -> Fill:
    client = _client(url, bucket, key)

    def run(memory: memoryview, take: Callable[[], tuple[str, int, int, int] | None]) -> None:
        while (wanted := take()) is not None:
            key, first, size, at = wanted
            body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{first + size - 1}")["Body"]
            got = 0
            while got < size:
                count = body.readinto(memory[at + got : at + size])
                if not count:
                    raise OSError("the answer ended")
                got += count

    return lambda memory, objects: _in_threads(run, memory, objects)


def boto3_download_fileobj(url: str, bucket: str, key: str) -> Fill:
    from boto3.s3.transfer import TransferConfig

    client = _client(url, bucket, key)
    config = TransferConfig(multipart_chunksize=RANGE_BYTES, max_concurrency=THREADS)

    def fill(memory: memoryview, objects: list[Object]) -> None:
        for key, size, at in objects:
            client.download_fileobj(bucket, key, _File(memory[at : at + size]), Config=config)

    return fill


class _File(io.RawIOBase):
    """Memory to write into and to seek in."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        self._at = base + offset
        return self._at

    def write(self, data: Any) -> int:
        self._memory[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


def _client(url: str, bucket: str, key: str) -> Any:
    """A boto3 client after its first request: what it reads and imports for that is not counted."""
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=2 * THREADS, response_checksum_validation="when_required")
    client = boto3.session.Session().client("s3", endpoint_url=url, config=config)
    client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0")["Body"].read()
    return client


def _in_threads(run: Callable[..., None], memory: memoryview, objects: list[Object]) -> None:
    ranges = [
        (key, first, min(RANGE_BYTES, size - first), at + first)
        for key, size, at in objects
        for first in range(0, size, RANGE_BYTES)
    ]
    counter = itertools.count()
    failures: list[BaseException] = []

    def take() -> tuple[str, int, int, int] | None:
        number = next(counter)
        return ranges[number] if number < len(ranges) else None

    def guarded() -> None:
        try:
            run(memory, take)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


CLIENTS: dict[str, Callable[[str, str, str], Fill]] = {
    "raw sockets": raw_sockets,
    "boto3 get_object": boto3_get_object,
    "boto3 download_fileobj": boto3_download_fileobj,
}


def main() -> None:
    """One client, one filling; the question comes first, and again to begin."""
    print(json.dumps({"clients": list(CLIENTS)}), flush=True)
    question = json.loads(sys.stdin.readline())
    fill = CLIENTS[question["client"]](question["url"], question["bucket"], question["objects"][0][0])
    objects: list[Object] = []
    end = 0
    for key, size in question["objects"]:
        objects.append((key, size, end))
        end += size
    with prefaulted(end) as memory:
        print(json.dumps({"prepared": True}), flush=True)
        sys.stdin.readline()
        used_s, began_s = time.process_time(), time.perf_counter()
        fill(memory, objects)
        answer: dict[str, Any] = {"ready_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - used_s}
        if question.get("digest"):
            answer["digest"] = hashlib.sha256(memory).hexdigest()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
