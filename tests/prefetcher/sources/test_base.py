"""One suite over every source: reads, and errors of reads."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.sources.base import ObjectRange, Piece, Source, check_key
from fleetstart.prefetcher.sources.errors import ObjectMissing, ObjectSizeMismatch, ReadCancelled
from fleetstart.prefetcher.sources.factory import open_source
from fleetstart.prefetcher.sources.folder import FolderSource
from tests.prefetcher.nodes import Store


def read(
    source: Source,
    key: str,
    object_bytes: int,
    offset: int,
    size_bytes: int,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    piece = Piece(size_bytes, memoryview(bytearray(size_bytes)))
    return list(source.read(ObjectRange(key, object_bytes, offset, [piece]), stopped))


def test_a_range_arrives_in_place_with_its_checksum(source: Source, store: Store) -> None:
    data = os.urandom(1_000_000)
    store.put("a/b", data)
    into = bytearray(700_000)
    pieces = [Piece(400_000, memoryview(into)[:400_000]), Piece(300_000, memoryview(into)[400_000:])]

    checksums = list(source.read(ObjectRange("a/b", len(data), 1234, pieces), lambda: False))

    assert into == data[1234 : 1234 + 700_000]
    assert checksums == [xxhash.xxh3_64_intdigest(into[:400_000]), xxhash.xxh3_64_intdigest(into[400_000:])]


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
        read(source, "no/such", 1, 0, 1)


@pytest.mark.parametrize("found_bytes", [0, 900, 999, 1001, 5000])
def test_an_object_of_another_length_gives_both(source: Source, store: Store, found_bytes: int) -> None:
    store.put("other", b"x" * found_bytes)

    with pytest.raises(ObjectSizeMismatch) as caught:
        read(source, "other", 1000, 900, 100)

    assert (caught.value.expected_bytes, caught.value.found_bytes) == (1000, found_bytes)


def test_an_abandoned_read_stops(source: Source, store: Store) -> None:
    store.put("large", bytes(2_000_000))

    with pytest.raises(ReadCancelled):
        read(source, "large", 2_000_000, 0, 2_000_000, stopped=lambda: True)


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
    assert isinstance(open_source(str(store.folder)), FolderSource)
    assert type(open_source("s3://bucket/some/prefix")).__name__ == "S3Source"


def test_a_prefix_is_part_of_every_key(store: Store, request: pytest.FixtureRequest, aws: None) -> None:
    server = request.getfixturevalue("s3_server")
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL", server.url)
    store.put("team/one/object", b"mine")

    assert open_source("s3://weights/team/one").read_object("object", 10) == b"mine"
