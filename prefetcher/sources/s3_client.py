"""What all that speaks to a bucket has in common. boto3 knows where the bucket is and who we are, and signs URLs."""

from __future__ import annotations

import http.client
from typing import Any

from .connection_pool import CONNECT_TIMEOUT_S

READ_TIMEOUT_S = 10.0
"""Without a single byte. Longest that an abandoned read can hold its memory."""
URL_LIVES_S = 3600
STALE_ERRORS = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


def open_client() -> Any:
    """One that tries nothing again, and leaves checksums to us."""
    import boto3  # late: it takes a third of a second, and a node whose store is a folder needs none
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        config=Config(
            signature_version="s3v4",
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": 1},
            # Chunks are checked, and objects of links digested, by who reads and writes them. S3's own checksums do not
            # cover ranges, and a signed URL must hold without one of the body.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
