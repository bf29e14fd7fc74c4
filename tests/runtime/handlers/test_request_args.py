"""Signatures and bodies: what each form takes, and that nothing that does not fit comes through."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidInput, TooLarge
from fleetstart.runtime.handlers.forms import VALUES_MAX
from fleetstart.runtime.handlers.request_args import argument_decoder

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Circle(msgspec.Struct, tag=True):
    radius: int = 1


class Square(msgspec.Struct, tag=True):
    side: int = 1


def whole(value): ...  # type: ignore[no-untyped-def]
def struct(point: Point) -> None: ...
def listed(points: list[Point]) -> None: ...
def named(a: int, b: str = "b", *, c: float | None = None) -> None: ...
def positional(a: int, b: int = 2, /) -> None: ...
def bounded(a: Annotated[int, msgspec.Meta(ge=1, le=3)]) -> None: ...
def nothing() -> None: ...
def raw(body: bytes) -> None: ...
def bytes_among_others(body: bytes, name: str) -> None: ...
def many(
    id: UUID | None = None,
    day: date | None = None,
    price: Decimal | None = None,
    shape: Circle | Square | None = None,
    names: dict[int, str] | None = None,
    count: int = 0,
) -> None: ...
def optional_whole(value=("the", "default")): ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("handler", "form"),
    [
        (whole, "whole"),
        (struct, "whole"),
        (optional_whole, "whole"),
        (listed, "fields"),
        (named, "fields"),
        (nothing, "fields"),
        (raw, "raw"),
        (bytes_among_others, "fields"),
    ],
)
def test_the_signature_tells_the_form(handler: Callable[..., Any], form: str) -> None:
    assert argument_decoder(handler).mode == form


def test_defaults_are_the_functions_own() -> None:
    assert argument_decoder(named).read(b'{"a": 1}', b"") == ((), {"a": 1, "b": "b", "c": None})
    assert argument_decoder(positional).read(b'{"a": 1}', b"") == ((1, 2), {})
    assert argument_decoder(optional_whole).read(b"", b"") == ((), {})


def test_constraints_of_an_annotation_hold() -> None:
    assert argument_decoder(bounded).read(b'{"a": 3}', b"") == ((), {"a": 3})
    with pytest.raises(InvalidInput, match=r"<= 3 at `a`, got 4"):
        argument_decoder(bounded).read(b'{"a": 4}', b"")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"id": "a"}', 'expected a valid UUID at `id`, got "a"'),
        (b'{"day": "2026-13-01"}', 'expected a valid RFC3339 encoded date at `day`, got "2026-13-01"'),
        (b'{"price": "a"}', 'expected a valid decimal string at `price`, got "a"'),
        (b'{"shape": {"type": "c"}}', 'expected one of "Circle", "Square" at `shape.type`, got "c"'),
        (b'{"names": {"a": "b"}}', "expected int as each key at `names`, got str"),
        (b'{"count": 1%s}' % (b"0" * 5000), "expected integer within range at `count`, got another value"),
    ],
)
def test_a_refusal_says_what_was_expected(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        argument_decoder(many).read(body, b"")
    assert refusal.value.message == f"the input does not fit: {sentence}"


def test_a_body_of_null_is_no_object() -> None:
    with pytest.raises(InvalidInput):
        argument_decoder(named).read(b"null", b"")
    assert argument_decoder(whole).read(b"null", b"") == ((None,), {})


def test_the_query_counts_only_without_a_body() -> None:
    assert argument_decoder(named).read(b'{"a": 1}', b"a=2")[1]["a"] == 1
    assert argument_decoder(named).read(b"", b"a=2&c=1.5")[1] == {"a": 2, "b": "b", "c": 1.5}
    assert argument_decoder(named).read(b"", b"a=2&b=%C3%A4+x")[1]["b"] == "ä x"


def test_text_of_a_query_or_form_may_stand_in_utf_8_without_escapes() -> None:
    text, form = "a=2&b=Zoë+%C3%A4".encode(), b"application/x-www-form-urlencoded"
    assert argument_decoder(named).read(b"", text)[1]["b"] == "Zoë ä"
    assert argument_decoder(named).read(text, b"", form)[1]["b"] == "Zoë ä"
    assert argument_decoder(named).read(b"", b"a=2&b=Zo\xeb+%EB")[1]["b"] == "Zo\ufffd \ufffd"


def test_a_form_of_very_many_values_is_refused_before_it_is_split() -> None:
    """Two megabytes of them took more than the 64 MiB of a small worker."""
    form = b"application/x-www-form-urlencoded"
    many = b"a=2" + b"&b=x" * (VALUES_MAX - 1)
    with pytest.raises(InvalidInput):  # not of a list type
        argument_decoder(named).read(many, b"", form)
    with pytest.raises(TooLarge, match=f"more than {VALUES_MAX} values"):
        argument_decoder(named).read(many + b"&c=1", b"", form)


def test_deep_nesting_is_refused_and_does_not_recurse() -> None:
    with pytest.raises(InvalidInput):
        argument_decoder(whole).read(b"[" * 100_000, b"")


@given(json_values)
def test_a_whole_body_arrives_as_it_was_sent(value: Any) -> None:
    assert argument_decoder(whole).read(msgspec.json.encode(value), b"") == ((value,), {})


@given(st.binary(max_size=40) | json_values.map(msgspec.json.encode), st.binary(max_size=20))
def test_any_body_gives_fitting_arguments_or_invalid_input(body: bytes, query: bytes) -> None:
    inputs = argument_decoder(named)
    try:
        positional_arguments, arguments = inputs.read(body, query)
    except InvalidInput as error:
        assert error.hint  # noqa: PT017
    else:
        assert positional_arguments == ()
        assert isinstance(arguments["a"], int)
        assert isinstance(arguments["b"], str)
