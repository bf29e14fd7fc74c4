"""Throughput of an S3 bucket: reads ranges of the largest part of a checkpoint, as fetches do."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from fleetstart import native
from fleetstart.runtime.contract.store_url import S3Url

from ..sources.base import ObjectRange, Piece
from ..sources.errors import ObjectMissing, ObjectSizeMismatch, ReadCancelled, SourceError
from ..sources.http_settings import HttpSettings
from ..sources.s3 import S3Source
from ..sources.s3_client import open_client
from .rounds import Rounds

RANGE_BYTES = S3Source.run_bytes
PIECE_BYTES = 1024 * 1024
"""Pieces are counted one by one, so that a slow store gives a figure within a round too."""
CONNECTIONS = (4, 16)
"""The default of fetches (FS_FETCH_THREADS), and a higher number, which shows whether each connection has a limit."""
LISTED_MOST = 10_000


class NotMeasured(Exception):
    """The store could not be measured; the message says why."""


class NothingToRead(Exception):
    """The store has no object large enough."""


def measure_store(
    url: S3Url, region: native.Region, *, rounds: int, round_s: float, least_bytes: int, http: HttpSettings
) -> tuple[float, str]:
    """Bytes a second, and a description. Errors: NotMeasured, NothingToRead."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        key, size_bytes = _largest_part(url.bucket, url.prefix)
        if size_bytes < least_bytes:
            found = "no checkpoint" if not key else f"only {size_bytes:,} bytes in one part"
            raise NothingToRead(f"{url} has {found} to read: deploy one, and measure again")
        part = Rounds(
            -(-size_bytes // RANGE_BYTES),
            _reader(S3Source(bucket=url.bucket, prefix=url.prefix, http_settings=http), key, size_bytes, region),
        )
        rates = {count: median(part.run(count, round_s) for _ in range(rounds)) for count in CONNECTIONS}
    except (BotoCoreError, ClientError, SourceError, ObjectMissing, ObjectSizeMismatch) as error:
        raise NotMeasured(f"{url} cannot be read: {error}") from error
    best = max(rates, key=lambda count: rates[count])
    if rates[best] == 0:
        raise NotMeasured(f"{url} gave nothing in {round_s:g} s")
    others = ", ".join(f"{rates[count] / 1e9:.3g} GB/s by {count}" for count in CONNECTIONS if count != best)
    return rates[best], f"{url} by {best} connections; {others}"


def _largest_part(bucket: str, prefix: str) -> tuple[str, int]:
    """Key and size of the largest part of any checkpoint; empty and 0 if there is none."""
    client = open_client()
    try:
        root = f"{prefix}/" if prefix else ""
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{root}checkpoints/", PaginationConfig={"MaxItems": LISTED_MOST}
        )
        sizes = {
            found["Key"].removeprefix(root): int(found["Size"]) for page in pages for found in page.get("Contents", ())
        }
    finally:
        client.close()
    parts = [key for key in sizes if key.endswith(".safetensors")]
    largest = max(parts, key=lambda key: sizes[key], default="")
    return largest, sizes.get(largest, 0)


def _reader(
    source: S3Source, key: str, size_bytes: int, region: native.Region
) -> Callable[[int, Callable[[], bool]], int]:
    """Reads one range of the part. Threads may share buffers: the bytes are discarded."""
    buffers = max(1, region.size_bytes // PIECE_BYTES)

    def take(number: int, stopped: Callable[[], bool]) -> int:
        begin, end = number * RANGE_BYTES, min((number + 1) * RANGE_BYTES, size_bytes)
        pieces = [
            Piece(
                min(PIECE_BYTES, end - offset),
                region.view(offset // PIECE_BYTES % buffers * PIECE_BYTES, PIECE_BYTES),
            )
            for offset in range(begin, end, PIECE_BYTES)
        ]
        done_bytes = 0
        try:
            for piece, _ in zip(pieces, source.read(ObjectRange(key, size_bytes, begin, pieces), stopped), strict=True):
                done_bytes += piece.size_bytes
        except ReadCancelled:
            pass
        return done_bytes

    return take
