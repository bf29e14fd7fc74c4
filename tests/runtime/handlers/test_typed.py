"""What handlers are given and give is what their signatures say; what is not is told with its field."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidInput, InvalidOutput
from fleetstart.runtime.handlers.request_args import argument_decoder
from fleetstart.runtime.handlers.result_encoding import result_encoding_of
from fleetstart.runtime.sdk.files import File
from fleetstart.runtime.sdk.responses import Response


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@dataclasses.dataclass
class Item:
    name: str
    price: float
    size: Size = Size.SMALL

    def __post_init__(self) -> None:
        if self.price < 0:
            raise ValueError("a price is not negative")


class Options(TypedDict):
    top: int
    mode: NotRequired[Literal["fast", "good"]]


class Order(msgspec.Struct, forbid_unknown_fields=True):
    items: list[Item]
    options: Options
    note: Annotated[str, msgspec.Meta(max_length=5)] = ""


class Model(pydantic.BaseModel):
    count: int = pydantic.Field(ge=1)
    inner: list[int] | None = None
    tags: list[str] = []


class Holder(msgspec.Struct):
    model: Model


def order(order: Order) -> None: ...
def model(model: Model) -> None: ...
def holder(holder: Holder) -> None: ...
def fields(
    size: Size, count: Annotated[int, pydantic.Field(ge=1, lt=9)] = 1, point: tuple[int, str] = (0, "")
) -> None: ...
def weights(by: dict[str, Annotated[float, msgspec.Meta(gt=0)]], n: int = 0) -> None: ...
def optional(count: Annotated[int | None, pydantic.Field(ge=1)] = None) -> None: ...


GOOD = {"items": [{"name": "a", "price": 1}], "options": {"top": 1}}


@pytest.mark.parametrize(
    ("handler", "body", "field", "expected", "got"),
    [
        (order, {**GOOD, "items": [{"name": "a", "price": "1"}]}, "items[0].price", "float", '"1"'),
        (order, {**GOOD, "items": [{"name": "a"}]}, "items[0].price", "float", "nothing"),
        (order, {**GOOD, "items": [{"name": "a", "price": -1}]}, "items[0]", "a price is not negative", '"price"'),
        (order, {**GOOD, "items": [{"name": "a", "price": 1, "size": "m"}]}, "items[0].size", 'one of "s", "l"', '"m"'),
        (order, {**GOOD, "options": {"top": 1, "mode": "bad"}}, "options.mode", '"fast"', '"bad"'),
        (order, {**GOOD, "options": 3}, "options", "object", "3"),
        (order, {**GOOD, "nota": "x"}, "nota", "did you mean 'note'?", '"x"'),
        (order, {**GOOD, "note": "too long"}, "note", "length <= 5", '"too long"'),
        (order, [1], "", "object", "[1]"),
        (model, {"count": 0}, "count", "greater than or equal to 1", "0"),
        (model, {"count": 1, "tags": ["a", 3]}, "tags[1]", "valid string", "3"),
        (model, {}, "count", "required", "nothing"),
        (holder, {"model": {"count": "x"}}, "model.count", "valid integer", '"x"'),
        (fields, {"size": "s", "count": 9}, "count", "<= 8", "9"),
        (fields, {"size": "s", "point": [1, 2]}, "point[1]", "str", "2"),
        (fields, {}, "size", 'one of "s", "l"', "nothing"),
        (optional, {"count": 0}, "count", ">= 1", "0"),
        (weights, {"by": {"a": 1, "b": -2}}, "by[...]", "> 0", "another value"),
    ],
)
def test_what_does_not_fit_is_told_with_field_expectation_and_value(
    handler: Callable[..., Any], body: Any, field: str, expected: str, got: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        argument_decoder(handler).read(msgspec.json.encode(body), b"")
    info = caught.value.info()
    assert (info.code, info.field) == ("invalid_input", field)
    assert expected in info.expected
    assert got in info.got
    assert info.hint


def test_a_field_that_is_not_there_is_called_that() -> None:
    for body, said in (
        (b'{"sise": "s"}', "there is no field `sise` (did you mean 'size'?)"),
        (b'{"size": "s", "zz": 1}', "there is no field `zz` (there are: size, count, point)"),
    ):
        with pytest.raises(InvalidInput) as caught:
            argument_decoder(fields).read(body, b"")
        assert said in caught.value.message


def test_broken_json_of_curl_is_called_that() -> None:
    """curl calls what it sends a form, unless told otherwise."""
    with pytest.raises(InvalidInput, match="the body is not JSON"):
        argument_decoder(fields).read(b'{"size":', b"", b"application/x-www-form-urlencoded")


def test_what_came_is_named_by_its_type_where_its_rest_is_no_json() -> None:
    with pytest.raises(InvalidInput, match="expected object, got array"):
        argument_decoder(fields).read(b"[1, 2", b"")


def test_what_fits_arrives_as_its_type() -> None:
    (taken,), _ = argument_decoder(order).read(msgspec.json.encode(GOOD), b"")
    assert taken == Order(items=[Item("a", 1.0)], options={"top": 1})
    (made,), _ = argument_decoder(model).read(b'{"count": 2}', b"")
    assert made == Model(count=2)
    assert argument_decoder(fields).read(b'{"size": "l"}', b"")[1] == {"size": Size.LARGE, "count": 1, "point": (0, "")}


def test_query_and_form_fill_fields_of_any_object() -> None:
    assert argument_decoder(model).read(b"", b"count=3&tags=a")[0] == (Model(count=3, tags=["a"]),)
    read = argument_decoder(fields).read(b"size=l&count=2", b"", b"application/x-www-form-urlencoded")
    assert read[1]["size"] is Size.LARGE
    # curl calls everything a form that is not called something else
    read = argument_decoder(fields).read(b'{"size": "l"}', b"", b"application/x-www-form-urlencoded")
    assert read[1]["size"] is Size.LARGE


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["items", "options", "name", "price", "x", "a.b[0]"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_json_fits_or_names_a_field(value: Any) -> None:
    body = msgspec.json.encode(value)
    for handler in (order, model, holder, weights):
        try:
            argument_decoder(handler).read(body, b"")
        except InvalidInput as error:
            assert error.expected  # noqa: PT017
            assert len(error.got) <= 200  # noqa: PT017


# ── outputs ────────────────────────────────────────────────────────────────────────────────────────


def gives_order() -> Order: ...  # type: ignore[empty-body]
def gives_floats() -> list[float]: ...  # type: ignore[empty-body]
def gives_model() -> Model: ...  # type: ignore[empty-body]
def gives_bytes() -> bytes: ...  # type: ignore[empty-body]
def gives_text() -> str: ...  # type: ignore[empty-body]
def gives_maybe() -> Item | None: ...
def gives_either() -> Item | Response: ...  # type: ignore[empty-body]
def gives_anything(): ...  # type: ignore[no-untyped-def]
def gives_items() -> Iterator[Item]: ...  # type: ignore[empty-body]
async def gives_items_async() -> AsyncIterator[Item]:
    yield Item("a", 1)


@pytest.mark.parametrize(
    ("handler", "value", "data"),
    [
        (gives_order, {**GOOD}, {**GOOD, "items": [{"name": "a", "price": 1.0}], "note": ""}),
        (gives_floats, [1, 2.5], [1.0, 2.5]),
        (gives_floats, (1,), [1.0]),
        (gives_model, {"count": 1}, {"count": 1, "inner": None, "tags": []}),
        (gives_model, Model(count=2), {"count": 2, "inner": None, "tags": []}),
        (gives_maybe, None, None),
        (gives_either, {"name": "b", "price": 2}, {"name": "b", "price": 2.0}),
        (gives_anything, {"x": {1}}, {"x": [1]}),
        (gives_anything, Model(count=2), {"count": 2, "inner": None, "tags": []}),
    ],
)
def test_an_answer_is_converted_by_its_type(handler: Callable[..., Any], value: Any, data: Any) -> None:
    assert msgspec.json.decode(result_encoding_of(handler).value.encode(value)) == data


@pytest.mark.parametrize(
    ("handler", "value", "field", "expected"),
    [
        (gives_order, Order([Item("a", 1)], {"top": "1"}), "options.top", "int"),  # type: ignore[typeddict-item]
        (gives_order, None, "", "object"),
        (gives_floats, [1.0, float("nan")], "[1]", "float"),
        (gives_model, {"count": 0}, "count", "greater than or equal to 1"),
        (gives_text, b"bytes", "", "str"),
        (gives_bytes, "text", "", "bytes"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_field(
    handler: Callable[..., Any], value: Any, field: str, expected: str
) -> None:
    with pytest.raises(InvalidOutput) as caught:
        result_encoding_of(handler).value.encode(value)
    info = caught.value.info()
    assert (info.code, info.field) == ("invalid_output", field)
    assert expected in info.expected


def test_items_of_a_stream_are_converted() -> None:
    for handler in (gives_items, gives_items_async):
        item = result_encoding_of(handler).item
        assert msgspec.json.decode(item.encode({"name": "a", "price": 1})) == {"name": "a", "price": 1.0}
        with pytest.raises(InvalidOutput, match="price"):
            item.encode({"name": "a", "price": None})


class Picture:
    __module__ = "PIL.Image"


class Array:
    size = 2_000_000

    def tolist(self) -> list[int]:
        raise AssertionError("too large to be tried")


@pytest.mark.parametrize(
    ("value", "advice"), [(Picture(), "image/png"), (Array(), "tobytes"), (object(), "no JSON form")]
)
def test_what_has_no_json_form_is_told_with_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        result_encoding_of(gives_anything).value.encode(value)


# ── files and responses ────────────────────────────────────────────────────────────────────────────


def test_a_file_is_an_open_file_without_folders_in_its_name() -> None:
    file = File("../../etc/pass\0wd", "text/plain")
    file.write(b"one\ntwo\n")
    file.seek(0)
    assert (file.name, file.size_bytes, list(file), file.content()) == (
        "passwd",
        8,
        [b"one\n", b"two\n"],
        b"one\ntwo\n",
    )
    file.close()
    assert file.closed


@pytest.mark.parametrize(
    "arguments",
    [
        {"status": 100},
        {"status": True},
        {"content_type": "a\r\nb: c"},
        {"headers": {"x": "a\nb"}},
        {"headers": {"x y": "a"}},
        {"headers": {"Content-Type": "text/html"}},
        {"headers": {"Content-Length": "3"}},
    ],
)
def test_a_response_that_http_cannot_say_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Response"):
        Response(b"", **arguments)
