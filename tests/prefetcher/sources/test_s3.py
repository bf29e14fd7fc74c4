"""The S3 source against a failing store: the right bytes, or an error that names the failure."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from fleetstart.prefetcher.sources import s3
from fleetstart.prefetcher.sources.base import ObjectRange, Piece
from fleetstart.prefetcher.sources.errors import ObjectMissing, ObjectSizeMismatch, SourceError
from fleetstart.prefetcher.sources.http_settings import HttpSettings, http_settings
from fleetstart.prefetcher.sources.s3 import S3Source
from fleetstart.prefetcher.sources.s3_body import READ_BYTES
from fleetstart.prefetcher.sources.s3_client import ConnectionPool, open_client
from fleetstart.prefetcher.sources.throttle import BackgroundThrottle
from tests.prefetcher.faulty_s3 import (
    Fault,
    FaultyS3,
    answers_200,
    closes_after_it,
    comes_in,
    ends_after,
    gives_another_range,
    lies_about_its_length,
    resets_after,
    right,
    says,
    stalls_after,
    talks_nonsense,
    trickles,
)
from tests.tls.certificates import self_signed

CHUNK = 1 << 20
DATA = os.urandom(8 * CHUNK)


def test_a_second_client_reads_no_descriptions_of_services_and_has_its_own_credentials(
    aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.loaders import JSONFileLoader

    def load_file(self: JSONFileLoader, path: str) -> None:
        raise AssertionError(f"{path} is read again")

    open_client()
    monkeypatch.setattr(JSONFileLoader, "load_file", load_file)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert "another" in open_client().generate_presigned_url("get_object", Params={"Bucket": "b", "Key": "k"})


def test_a_connection_that_comes_back_to_a_closed_pool_is_closed() -> None:
    """Its reader may have been between two requests while the pool was closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url, pool = f"http://127.0.0.1:{server.getsockname()[1]}/part", ConnectionPool(HttpSettings())
        connection, _ = pool.take(url)
        connection.connect()
        pool.close()
        pool.give_back(url, connection)
        assert connection.sock is None


@pytest.fixture
def faulty(tmp_path: Path, aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "part").write_bytes(DATA)
    server = FaultyS3(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    yield server
    server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens timeouts from seconds to tenths."""
    monkeypatch.setattr(s3, "STALL_S", 0.2)
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.6)
    monkeypatch.setattr(s3, "LAG_AFTER_S", 0.1)


def read(
    source: S3Source,
    begin: int = 0,
    chunks: int = 4,
    *,
    object_bytes: int = len(DATA),
    throttle: BackgroundThrottle | None = None,
) -> bytes:
    into = memoryview(bytearray(chunks * CHUNK))
    pieces = [Piece(CHUNK, into[at * CHUNK : (at + 1) * CHUNK]) for at in range(chunks)]
    checksums = list(source.read(ObjectRange("part", object_bytes, begin, pieces, throttle), lambda: False))
    assert checksums == [xxhash.xxh3_64_intdigest(piece.into) for piece in pieces]
    return bytes(into)


def test_one_request_fills_several_pieces_and_the_connection_is_used_again(faulty: FaultyS3) -> None:
    source = S3Source(bucket="weights")

    assert read(source) == DATA[: 4 * CHUNK]
    assert read(source, 4 * CHUNK) == DATA[4 * CHUNK :]

    assert faulty.ranges == [(0, 4 * CHUNK), (4 * CHUNK, 8 * CHUNK)]
    assert len(set(faulty.queries)) == 1, "one signature an object"


@pytest.mark.parametrize("throttle", [None, BackgroundThrottle()], ids=["wanted", "in the background"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_an_answer_after_which_the_store_closes_is_read_whole_and_its_connection_is_not_used_again(
    faulty: FaultyS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encrypted: bool,
    throttle: BackgroundThrottle | None,
) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with contextlib.closing(FaultyS3(tmp_path, context)) as behind_tls:
        server = behind_tls if encrypted else faulty
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        source = S3Source(bucket="weights", http_settings=HttpSettings(ca_bundle=str(certificate)))
        server.faults = [right, closes_after_it]

        for begin in (0, 4 * CHUNK, 0):
            assert read(source, begin, throttle=throttle) == DATA[begin : begin + 4 * CHUNK]

        assert server.ranges == [(0, 4 * CHUNK), (4 * CHUNK, 8 * CHUNK), (0, 4 * CHUNK)]
        first, second, third = server.readers
        assert first == second
        assert second != third


@pytest.mark.parametrize("fault", [stalls_after(2 * CHUNK + 1000), trickles], ids=["stalls", "trickles"])
def test_a_range_that_stalls_or_lags_goes_on_elsewhere_from_where_it_stopped(
    faulty: FaultyS3, impatient: None, fault: Fault
) -> None:
    source = S3Source(bucket="weights")
    read(source)  # so that it knows what is usual
    faulty.ranges.clear()
    faulty.faults = [fault]

    assert read(source) == DATA[: 4 * CHUNK]

    (_, (again, end)) = faulty.ranges
    assert end == 4 * CHUNK
    if fault is not trickles:
        assert 2 * CHUNK - READ_BYTES <= again <= 2 * CHUNK + 1000


@pytest.mark.slow
def test_a_range_that_lags_at_the_end_of_a_piece_loses_none(faulty: FaultyS3, impatient: None) -> None:
    source = S3Source(bucket="weights")
    read(source)
    faulty.faults = [comes_in(CHUNK, 0.15)]

    assert read(source) == DATA[: 4 * CHUNK]


def test_a_store_that_stalls_for_ever_is_an_error_in_time(faulty: FaultyS3, impatient: None) -> None:
    faulty.always = stalls_after(100)

    with pytest.raises(SourceError, match=r"part: no byte after \d+ in 0\.6 s"):
        read(S3Source(bucket="weights"))

    assert len(faulty.ranges) == s3.MAX_LAGS + 1


def test_a_store_that_is_slow_for_all_is_waited_for(
    faulty: FaultyS3, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "STALL_S", 10.0)  # on a busy machine a block comes late, which is no stall
    faulty.always = trickles

    assert read(S3Source(bucket="weights"), 7 * CHUNK, 1) == DATA[7 * CHUNK :]
    assert len(faulty.ranges) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (resets_after(CHUNK + 5), "part: at byte .*reset"),
        (ends_after(CHUNK + 5), f"part: the answer ended after byte {2 * CHUNK + 5}"),
        (ends_after(0), f"part: the answer ended after byte {CHUNK}"),
        (answers_200, "status 200 OK, not 206"),
        (says(500), "status 500"),
        (says(503), "status 503"),
        (says(301), "status 301"),
        (gives_another_range, rf"bytes 0-{CHUNK * 4 - 1} in {CHUNK * 4} bytes came for bytes {CHUNK}-{CHUNK * 5 - 1}"),
        (lies_about_its_length, f"in {CHUNK * 4 + 1000} bytes came for"),
        (talks_nonsense, "part: at byte"),
    ],
)
def test_what_a_store_did_wrong_is_said_and_the_next_read_is_right(
    faulty: FaultyS3, fault: Fault, message: str
) -> None:
    source = S3Source(bucket="weights")
    faulty.faults = [fault]

    with pytest.raises(SourceError, match=message):
        read(source, CHUNK)

    assert read(source, CHUNK) == DATA[CHUNK : 5 * CHUNK]


def test_pieces_that_came_before_a_fault_are_given(faulty: FaultyS3) -> None:
    faulty.faults = [resets_after(2 * CHUNK + 5)]
    into = memoryview(bytearray(4 * CHUNK))
    pieces = [Piece(CHUNK, into[at * CHUNK : (at + 1) * CHUNK]) for at in range(4)]
    given: list[int] = []

    with pytest.raises(SourceError):
        given.extend(S3Source(bucket="weights").read(ObjectRange("part", len(DATA), 0, pieces), lambda: False))

    # A reset may overtake bytes on their way, but never those that were read.
    assert given == [xxhash.xxh3_64_intdigest(piece.into) for piece in pieces[: len(given)]]
    assert len(given) <= 2


@pytest.mark.parametrize("expected", [len(DATA) - 1, len(DATA) + 1])
def test_an_object_that_was_replaced_by_one_of_another_length_is_noticed(faulty: FaultyS3, expected: int) -> None:
    with pytest.raises(ObjectSizeMismatch) as caught:
        read(S3Source(bucket="weights"), object_bytes=expected)
    assert (caught.value.expected_bytes, caught.value.found_bytes) == (expected, len(DATA))


def test_an_object_that_is_gone_is_missing(faulty: FaultyS3) -> None:
    (faulty.root / "weights" / "part").unlink()
    with pytest.raises(ObjectMissing, match="part"):
        read(S3Source(bucket="weights"))


def test_a_refused_signature_is_made_anew(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    source = S3Source(bucket="weights")
    read(source)
    faulty.faults = [says(403)]
    with pytest.raises(SourceError, match="403"):
        read(source)
    assert not source._urls
    assert read(source) == DATA[: 4 * CHUNK]


@pytest.mark.slow
def test_without_credentials_the_error_says_so(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SourceError, match="credentials"):
        read(S3Source(bucket="weights"))


def test_the_key_of_a_profile_signs(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("[ops]\naws_access_key_id=FROMPROFILE\naws_secret_access_key=x\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "ops")

    read(S3Source(bucket="weights"))

    assert "FROMPROFILE" in faulty.queries[0]


def test_a_proxy_is_used_as_the_environment_says() -> None:
    settings = http_settings(
        {
            "http_proxy": "http://proxy:3128", "HTTP_PROXY": "http://other:1", "no_proxy": "127.0.0.1,.local",
            "HTTPS_PROXY": "http://secure:8080", "AWS_CA_BUNDLE": "a", "REQUESTS_CA_BUNDLE": "b",
        }
    )  # fmt: skip
    pool = ConnectionPool(settings)

    assert pool.proxy_for("http://bucket.example/part") == ("proxy", 3128)
    assert pool.request_path("http://bucket.example/part?x=1") == "http://bucket.example/part?x=1"
    assert pool.proxy_for("http://127.0.0.1/part") is None
    assert pool.proxy_for("http://store.local/part") is None
    assert pool.request_path("http://127.0.0.1/part?x=1") == "/part?x=1"
    assert pool.proxy_for("https://bucket.example/part") == ("secure", 8080)
    assert settings.ca_bundle == "a"
    assert http_settings({"http_proxy": "", "HTTP_PROXY": "http://other:1"}) == HttpSettings(), "empty turns it off"
