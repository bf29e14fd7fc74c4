"""One suite over every source: what it reads, and how it says that it cannot."""

from __future__ import annotations

import os

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.sources import (
    Abandoned,
    FileSource,
    ObjectMissing,
    ObjectShort,
    Source,
    check_key,
    open_source,
)
from tests.prefetcher.nodes import Store


def test_a_range_arrives_in_place_with_its_checksum(source: Source, store: Store) -> None:
    data = os.urandom(1_000_000)
    store.put("a/b", data)
    into = bytearray(700_000)

    checksum = source.read_range("a/b", 1234, memoryview(into), lambda: False)

    assert into == data[1234 : 1234 + 700_000]
    assert checksum == xxhash.xxh3_64_intdigest(bytes(into))


def test_an_object_arrives_whole(source: Source, store: Store) -> None:
    store.put("manifest.json", b"{}" * 1000)
    store.put("empty", b"")

    assert source.read_object("manifest.json", 10_000) == b"{}" * 1000
    assert source.read_object("empty", 10) == b""


def test_an_object_beyond_the_limit_is_not_read(source: Source, store: Store) -> None:
    store.put("large", b"x" * 1001)

    with pytest.raises(ValueError, match="1001 bytes, 1000 at most"):
        source.read_object("large", 1000)


def test_a_missing_object_is_named(source: Source) -> None:
    with pytest.raises(ObjectMissing, match="no/such"):
        source.read_object("no/such", 10)
    with pytest.raises(ObjectMissing, match="no/such"):
        source.read_range("no/such", 0, memoryview(bytearray(1)), lambda: False)


@pytest.mark.parametrize("offset", [900, 1000, 5000])
def test_an_object_that_ends_too_early_gives_both_lengths(source: Source, store: Store, offset: int) -> None:
    store.put("short", b"x" * 1000)

    with pytest.raises(ObjectShort) as caught:
        source.read_range("short", offset, memoryview(bytearray(200)), lambda: False)

    assert (caught.value.expected_bytes, caught.value.found_bytes) == (offset + 200, 1000)


def test_an_abandoned_read_stops(source: Source, store: Store) -> None:
    store.put("large", bytes(2_000_000))

    with pytest.raises(Abandoned):
        source.read_range("large", 0, memoryview(bytearray(2_000_000)), lambda: True)


@pytest.mark.parametrize("key", ["../secret", "a/../../secret", "/etc/passwd", "a//b", "", ".", "a/./b", "a\0b"])
def test_no_key_leads_out_of_the_store(source: Source, key: str) -> None:
    with pytest.raises(ObjectMissing):
        source.read_object(key, 10)


@given(st.text(max_size=40))
def test_a_key_that_passes_has_no_special_parts(key: str) -> None:
    try:
        check_key(key)
    except ObjectMissing:
        return
    assert not {"", ".", ".."} & set(key.split("/"))


def test_the_store_setting_chooses_the_source(store: Store, aws: None) -> None:
    assert isinstance(open_source(str(store.folder)), FileSource)
    assert type(open_source("s3://bucket/some/prefix")).__name__ == "S3Source"


def test_a_prefix_is_part_of_every_key(store: Store, request: pytest.FixtureRequest, aws: None) -> None:
    server = request.getfixturevalue("s3_server")
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL", server.url)
    store.put("team/one/object", b"mine")

    assert open_source("s3://weights/team/one").read_object("object", 10) == b"mine"
