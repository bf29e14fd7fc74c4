"""Signatures that no request can fill, or that nothing would check: no worker starts, and it says what to write."""

from __future__ import annotations

import dataclasses
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


class Described(msgspec.Struct):
    note: Annotated[str, pydantic.Field(description="said, not checked")] = ""
    again: Described | None = None


class Whole(pydantic.BaseModel):
    limited: Limited


def in_a_dataclass(limited: Limited) -> None: ...
def deep_inside(by: dict[str, list[Holding]], n: int = 0) -> None: ...
def in_a_default(value: Defaulting) -> None: ...
def in_a_tuple(tuples: list[Tuple]) -> None: ...
def described(described: Described) -> None: ...
def in_a_model(whole: Whole) -> None: ...


@pytest.mark.parametrize(
    ("handler", "field"),
    [
        (in_a_dataclass, "Limited.names"),
        (deep_inside, "Limited.names"),
        (in_a_tuple, "Tuple.most"),
        (in_a_default, "Defaulting.count"),
    ],
)
def test_a_constraint_of_a_field_that_nothing_checks_is_refused_when_the_worker_starts(
    handler: Callable[..., Any], field: str
) -> None:
    with pytest.raises(TypeError, match=rf"{field} has a constraint of pydantic.*write Annotated.*msgspec\.Meta"):
        argument_decoder(handler)


def test_constraints_in_pydantic_models_and_texts_that_constrain_nothing_are_taken() -> None:
    assert argument_decoder(described).read(b'{"note": "a"}', b"")[0] == (Described("a"),)
    with pytest.raises(InvalidInput, match="at most 3 characters"):
        argument_decoder(in_a_model).read(b'{"limited": {"names": ["long"]}}', b"")


def streamed(x: Iterable[int]) -> None: ...
def streamed_inside(x: dict[str, list[Iterator[int]]], n: int = 0) -> None: ...
def queued(x: deque[int]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (streamed, r"Iterable\[int\] is not a type.*write list\["),
        (streamed_inside, r"Iterator\[int\] is not a type.*write list\["),
        (queued, r"deque\[int\] is not a type.*what JSON can say"),
    ],
)
def test_a_collection_that_no_request_can_fill_is_refused_when_the_worker_starts(
    handler: Callable[..., Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        argument_decoder(handler)


def test_a_class_that_no_request_can_fill_is_refused_when_the_worker_starts() -> None:
    def takes(stream: io.BytesIO, n: int) -> None: ...

    with pytest.raises(TypeError, match=r"'stream'.*io\.BytesIO.*take bytes, a File"):
        argument_decoder(takes)
