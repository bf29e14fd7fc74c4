"""Signatures that a deploy refuses. A worker of a version from before starts, serves what it can, and warns once."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Annotated, Any, ClassVar, NamedTuple, NotRequired, TypedDict

import annotated_types
import msgspec
import pydantic
import pytest

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.handlers.request_args import argument_decoder


@dataclasses.dataclass
class Limited:
    names: list[Annotated[str, pydantic.Field(max_length=3)]]
    total: ClassVar[Annotated[int, annotated_types.Ge(1)]] = 1


class Holding(TypedDict, total=False):
    limited: NotRequired[Limited | None]


class Tuple(NamedTuple):
    most: Annotated[int, annotated_types.Ge(1)]


@pydantic.dataclasses.dataclass
class Defaulting:
    count: int = pydantic.Field(default=1, ge=1)


@dataclasses.dataclass
class Priced:
    price: Annotated[Decimal, pydantic.Field(gt=Decimal(0))]


@dataclasses.dataclass
class Coded:
    code: Annotated[str, pydantic.Field(pattern="^a")]


class Kept:
    """A limit of a library of the user's own."""

    max_length = 3


class Described(msgspec.Struct):
    note: Annotated[str, pydantic.Field(description="said, not checked", max_length=None)] = ""
    code: Annotated[str, re.compile("^a")] = ""
    name: Annotated[str, Kept()] = ""
    again: Described | None = None


class Whole(pydantic.BaseModel):
    limited: Limited


def in_a_dataclass(limited: Limited) -> None: ...
def deep_inside(by: dict[str, list[Holding]], n: int = 0) -> None: ...
def in_a_default(value: Defaulting) -> None: ...
def in_a_tuple(tuples: list[Tuple]) -> None: ...
def of_a_decimal(priced: Priced) -> None: ...
def of_a_pattern(coded: Coded) -> None: ...
def described(described: Described) -> None: ...
def in_a_model(whole: Whole) -> None: ...


@pytest.mark.parametrize(
    ("handler", "field", "body"),
    [
        (in_a_dataclass, "Limited.names", b'{"names": ["long"]}'),
        (deep_inside, "Limited.names", b'{"by": {"a": [{"limited": {"names": ["long"]}}]}}'),
        (in_a_tuple, "Tuple.most", b'{"tuples": [[0]]}'),
        (in_a_default, "Defaulting.count", b'{"count": 2}'),
        (of_a_decimal, "Priced.price", b'{"price": "-1"}'),
        (of_a_pattern, "Coded.code", b'{"code": "b"}'),
    ],
)
def test_a_worker_whose_fields_have_constraints_that_nothing_checks_serves_and_warns_once(
    handler: Callable[..., Any], field: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = argument_decoder(handler)
    (line,) = caplog.messages
    assert re.search(rf"{field} has a constraint of pydantic.*write Annotated.*msgspec\.Meta", line)
    assert decoder.read(body, b"")
    assert len(caplog.messages) == 1


def test_constraints_in_pydantic_models_and_what_is_no_constraint_of_pydantic_give_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert argument_decoder(described).read(b'{"note": "a", "code": "b"}', b"")[0] == (Described("a", "b"),)
    with pytest.raises(InvalidInput, match="at most 3 characters"):
        argument_decoder(in_a_model).read(b'{"limited": {"names": ["long"]}}', b"")
    assert caplog.messages == []


def streamed(text: str, x: Iterable[int] = ()) -> None: ...
def streamed_or_none(text: str, x: Iterable[int] | None = None) -> None: ...
def streamed_inside(text: str, x: dict[str, list[Iterator[int]]] | None = None) -> None: ...
def queued(text: str, x: deque[int] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (streamed, r"'x': no request can fill .*Iterable\[int\]: write list\["),
        (streamed_or_none, r"'x': no request can fill .*Iterable\[int\]: write list\["),
        (streamed_inside, r"'x': no request can fill .*Iterator\[int\]: write list\["),
        (queued, r"'x': no request can fill .*deque\[int\]: .*what JSON can say"),
    ],
)
def test_calls_that_leave_out_what_no_request_can_fill_are_served(
    handler: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = argument_decoder(handler)
    (line,) = caplog.messages
    assert re.search(said, line)
    default = None if handler.__defaults__ is None else handler.__defaults__[0]
    assert decoder.read(b'{"text": "a"}', b"")[1] == {"text": "a", "x": default}
    with pytest.raises(InvalidInput, match=r"does not fit: expected \w+ at `x"):
        decoder.read(b'{"text": "a", "x": {"a": [[1]]}}', b"")


def test_all_that_a_deploy_would_refuse_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def takes(limited: Limited, queue: deque[int] | None = None) -> None: ...

    argument_decoder(takes)
    (line,) = caplog.messages
    assert "'limited'" in line
    assert "'queue'" in line


def test_a_class_that_no_request_can_fill_is_refused_when_the_worker_starts() -> None:
    def takes(stream: io.BytesIO, n: int) -> None: ...

    with pytest.raises(TypeError, match=r"'stream'.*io\.BytesIO.*take bytes, a File"):
        argument_decoder(takes)
