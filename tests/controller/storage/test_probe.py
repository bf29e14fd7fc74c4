"""A store that cannot be used is told apart: no bucket, no credentials, refused, no such host, no folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from fleetstart.controller.cli.local.backends import store_problem
from fleetstart.controller.storage.s3_errors import store_error
from tests.prefetcher.nodes import S3Server

AWS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    (tmp_path / "s3" / "models").mkdir(parents=True)
    server = S3Server(tmp_path / "s3")
    server.start()
    for name, value in {**AWS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.kill()


def problem(location: str) -> str:
    found = store_problem(location)
    assert found is None or found.hint
    return found.message if found is not None else ""


def test_a_store_that_keeps_what_is_written_passes_and_nothing_is_left(s3: S3Server, tmp_path: Path) -> None:
    assert problem("s3://models/some") == ""
    assert problem(str(tmp_path / "folder")) == ""
    for root in (s3.root, tmp_path / "folder"):
        assert not [path for path in root.rglob("*") if path.is_file() and "probe" in str(path)]


def test_a_bucket_that_is_not_there_is_named(s3: S3Server) -> None:
    assert "NoSuchBucket: there is no such bucket" in problem("s3://nobucket")


@pytest.mark.slow
def test_addresses_and_credentials_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it remembers credentials
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert "there are no credentials for it" in problem("s3://models")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    assert "it refused the connection (http://127.0.0.1:1" in problem("s3://models")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:9000")
    assert "there is no host of this name" in problem("s3://models")


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be made" in problem(str(tmp_path / "file" / "store"))


@pytest.mark.parametrize(("code", "detail", "says"), [
    ("403", "Forbidden", "the store answered 403: access is denied"),
    ("InvalidAccessKeyId", "…", "the access key is not known"),
    ("SlowDown", "Please reduce your request rate", "SlowDown: Please reduce your request rate"),
    ("", "", "the store answered an error: it gave no reason"),
])  # fmt: skip
def test_an_answer_is_a_sentence_and_never_ends_in_a_colon(code: str, detail: str, says: str) -> None:
    error = ClientError({"Error": {"Code": code, "Message": detail}}, "HeadObject")
    assert says in store_error("key", error).message
