"""A real HTTP S3 server with an empty bucket."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleetstart.controller.storage.s3_store import S3Store
from tests.servers import NO_CERTIFICATES, end, free_port, spawn, wait_until


@contextlib.contextmanager
def s3_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    """The store in its bucket; the environment names the server."""
    port = free_port()
    (folder / "s3").mkdir()
    process = spawn([Path(sys.executable).parent / "localbucket", "--port", str(port), folder / "s3"], cwd=folder)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), 20, what="S3 server")
        for name, value in {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        yield S3Store("bucket", "some/prefix")
    finally:
        end(process)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1, verify=NO_CERTIFICATES).status_code < 500
    except httpx.HTTPError:
        return False
