"""What a caller asks for, whatever the headers hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.async_invocations import request_options
from fleetstart.controller.async_invocations.request_options import (
    fingerprint,
    has_options,
    kept_headers,
    read_options,
    read_prefer,
)
from fleetstart.runtime.contract.errors import Refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("respond-async", (True, 0)),
        ("Respond-Async, wait=10", (True, 10)),
        ("wait=10; respond-async", (True, 10)),
        ('respond-async, wait="7"', (True, 7)),
        ("return=minimal, handling=lenient", (False, 0)),
        ("wait=999999999999", (False, request_options.WAIT_MAX_S)),
        ("respond-async, wait=soon", (True, 0)),
        ("wait=-1", (False, 0)),
        ("", (False, 0)),
    ],
)
def test_prefer_is_read_as_rfc_7240_has_it(text: str, expected: tuple[bool, int]) -> None:
    assert read_prefer(text) == expected


HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"prefer", b"idempotency-key", b"fs-webhook", b"fs-ttl-s", b"fs-queue-timeout-s", b"x-own"]),
        st.one_of(st.binary(max_size=20), st.sampled_from([b"respond-async", b"60", b"https://example.com/hook"])),
    ),
    max_size=6,
)


@given(HEADERS)
def test_any_headers_are_understood_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        options = read_options(headers, ())
    except Refused:
        return
    assert 1 <= options.ttl_s <= request_options.TTL_MAX_S
    assert 1 <= options.queue_s <= request_options.QUEUE_MAX_S
    assert has_options(headers) or options.nothing


def test_secrets_and_what_is_ours_are_not_kept() -> None:
    headers = [
        (b"authorization", b"Bearer x"), (b"cookie", b"a=b"), (b"prefer", b"respond-async"), (b"content-length", b"3"),
        (b"connection", b"close"), (b"x-own", b"1"), (b"content-type", b"text/plain"), (b"fs-webhook", b"https://x.y"),
    ]  # fmt: skip
    assert kept_headers(headers) == [("x-own", "1"), ("content-type", "text/plain")]


@given(st.text(max_size=9), st.text(max_size=9), st.binary(max_size=9), st.text(max_size=9), st.binary(max_size=9))
def test_only_the_same_call_has_the_same_fingerprint(
    project: str, target: str, body: bytes, other: str, other_body: bytes
) -> None:
    same = fingerprint(project, "POST", target, [], body) == fingerprint(project, "POST", other, [], other_body)
    if "\0" not in target + other:
        assert same == ((target, body) == (other, other_body))
