"""Store URLs: what is one, and that writing and reading them are inverses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.store_url import S3Url, is_s3, parse_s3, parse_store

BUCKETS = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,40}[a-z0-9]", fullmatch=True)


@given(BUCKETS, st.text(max_size=40))
def test_a_url_that_is_written_and_parsed_is_the_same(bucket: str, path: str) -> None:
    url = S3Url(bucket, path)
    assert is_s3(str(url))
    assert parse_s3(str(url)) == parse_store(str(url)) == url


@given(BUCKETS, st.text(max_size=20), st.integers(0, 3), st.integers(0, 3))
def test_slashes_around_a_prefix_do_not_count(bucket: str, prefix: str, before: int, after: int) -> None:
    url = parse_s3(f"s3://{bucket}/{'/' * before}{prefix}{'/' * after}")
    assert url.prefix == S3Url(bucket, prefix).prefix
    assert not url.prefix.startswith("/")
    assert not url.prefix.endswith("/")


@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [("s3://b", "b", ""), ("s3://b/", "b", ""), ("s3://b/team/one/", "b", "team/one"), ("s3://b//x", "b", "x")],
)
def test_buckets_and_prefixes(text: str, bucket: str, prefix: str) -> None:
    assert (parse_s3(text).bucket, parse_s3(text).prefix) == (bucket, prefix)


@pytest.mark.parametrize("text", ["s3://", "s3:///prefix"])
def test_a_url_without_a_bucket_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="names no bucket"):
        parse_store(text)


@pytest.mark.parametrize("text", ["/srv/store", "file:///srv/store"])
def test_what_is_not_s3_is_a_folder(text: str) -> None:
    assert parse_store(text) == Path("/srv/store")
    assert not is_s3(text)
