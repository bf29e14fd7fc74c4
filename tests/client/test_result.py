from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from fleetstart.client.errors import HandlerResponse, InputFailed, InvalidOutput, NotFound, RateLimited
from fleetstart.client.request import CallOptions, call_request, stream_request
from fleetstart.client.result import result_of, server_timing
from fleetstart.runtime.contract.call_format import BYTES, JSON, NOTHING, decode_error, decode_value, encode_input


@dataclass
class Point:
    x: int


def test_values_go_as_json_and_bytes_as_they_are() -> None:
    assert encode_input({"x": 1}, {}) == (b'{"x":1}', JSON)
    assert encode_input(Point(1), {}) == (b'{"x":1}', JSON)
    assert encode_input(NOTHING, {"x": 1}) == (b'{"x":1}', JSON)
    assert encode_input(None, {}) == (b"null", JSON)
    assert encode_input(memoryview(b"raw"), {}) == (b"raw", BYTES)
    assert encode_input(NOTHING, {}) == (None, "")
    with pytest.raises(TypeError, match="not both"):
        encode_input(1, {"x": 1})
    with pytest.raises(TypeError, match="cannot be sent as JSON"):
        encode_input(object(), {})


def test_each_call_has_a_key_and_a_stream_has_only_one_that_was_given() -> None:
    options = CallOptions(timeout_s=1)
    first, second = (call_request("f", options, NOTHING, {}) for _ in range(2))
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]
    assert "idempotency-key" not in stream_request("f", options, NOTHING, {}).headers
    assert not stream_request("f", options, NOTHING, {}).repeatable
    assert stream_request("f", CallOptions(timeout_s=1, idempotency_key="k"), NOTHING, {}).repeatable


@pytest.mark.parametrize(
    ("path", "input", "method", "target"),
    [
        ("", NOTHING, "POST", "/fn/web@2"),
        ("docs", NOTHING, "GET", "/fn/web@2/docs"),
        ("/items", {"x": 1}, "POST", "/fn/web@2/items"),
    ],
)
def test_the_method_follows_from_path_and_input(path: str, input: Any, method: str, target: str) -> None:
    call = call_request("web@2", CallOptions(timeout_s=1, path=path), input, {})
    assert (call.method, call.target) == (method, target)


@pytest.mark.parametrize(
    ("kind", "body", "returns", "value"),
    [
        ("application/json", b'{"x": 1}', Any, {"x": 1}),
        ("application/json; charset=utf-8", b'{"x": 1}', Point, Point(1)),
        ("application/problem+json", b"[1]", list[float], [1.0]),
        ("text/plain", b"hi", Any, "hi"),
        ("text/plain", b"hi", str, "hi"),
        ("image/png", b"\x89", Any, b"\x89"),
        ("application/json", b"[1]", bytes, b"[1]"),
        ("", b"", Any, None),
    ],
)
def test_answers_are_decoded_by_their_type(kind: str, body: bytes, returns: Any, value: Any) -> None:
    assert decode_value("f", kind, body, returns) == value


def test_an_answer_of_another_type_names_the_function_and_the_place() -> None:
    with pytest.raises(InvalidOutput, match=r"function f, .*`\$\.x`"):
        decode_value("f", JSON, b'{"x": "one"}', Point)
    with pytest.raises(InvalidOutput):
        decode_value("f", JSON, b"{", Any)
    with pytest.raises(InvalidOutput) as told:
        decode_value("f", JSON, b"5", str)
    assert told.value.message == (
        "the answer of function f, 1 bytes of application/json, does not fit `returns=str`: Expected `str`, got `int`"
    )


def test_a_result_has_bill_version_and_phases() -> None:
    headers = {
        "content-type": JSON, "x-request-id": "inv-1", "fs-version": "3", "fs-start": "hot", "fs-billed-ms": "12",
        "fs-cost": "0.000000040", "server-timing": 'queue;dur=0.5, execute;desc="x";dur=11.2, total;dur=12',
    }  # fmt: skip
    result = result_of("f", 200, headers, b"1", int)
    assert (result.value, result.request_id, result.version, result.start) == (1, "inv-1", 3, "hot")
    assert result.bill is not None
    assert (result.bill.billed_ms, result.bill.cost) == (12, Decimal("0.000000040"))
    assert result.phases_ms == {"queue": 0.5, "execute": 11.2, "total": 12.0}
    assert server_timing("") == {}


def test_a_stream_that_is_read_whole_is_the_list_of_its_items() -> None:
    body = (
        b"event: progress\ndata: {}\n\nid: 1\ndata: 1\n\nid: 2\ndata: 2\n\n"
        b'event: fleetstart\ndata: {"billed_ms": 5, "cost": "0.01", "start": "hot"}\n\n'
    )
    result = result_of("f", 200, {"content-type": "text/event-stream"}, body, int)
    assert result.value == [1, 2]
    assert result.bill is not None
    assert result.bill.cost == Decimal("0.01")


def test_errors_have_the_type_of_their_code_and_show_hint_and_request() -> None:
    info = b'{"code": "rate_limited", "message": "too many", "hint": "slower", "retry_after_s": 2}'
    body = b'{"error": %b, "request_id": "inv-1"}' % info
    error = decode_error(429, body)
    assert isinstance(error, RateLimited)
    assert (error.message, error.hint, error.retry_after_s) == ("too many", "slower", 2)
    assert error.__notes__ == ["hint: slower", "request: inv-1"]


def test_an_unknown_code_is_kept_and_a_body_that_is_no_error_is_shown() -> None:
    error = decode_error(409, b'{"error": {"code": "idempotency_mismatch", "message": "m"}}')
    assert (error.code, error.status) == ("idempotency_mismatch", 409)
    assert isinstance(decode_error(404, b"<html>no"), NotFound)
    assert "<html>no" in decode_error(500, b"<html>no").message


def test_a_handlers_own_status_is_told_from_the_platforms() -> None:
    with pytest.raises(HandlerResponse) as raised:
        result_of("f", 404, {"content-type": "text/plain"}, b"no such item", Any)
    assert (raised.value.status, raised.value.body) == (404, b"no such item")
    with pytest.raises(NotFound):
        result_of("f", 404, {"fs-error": "not_found"}, b'{"error": {"code": "not_found", "message": "m"}}', Any)


def test_a_failed_input_is_named_and_shown_in_part() -> None:
    error = InputFailed(3, "x" * 1000, NotFound("no", hint="look"))
    assert (error.index, error.code, error.hint) == (3, "not_found", "look")
    assert len(error.message) < 250
