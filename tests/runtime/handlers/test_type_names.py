"""Types as errors name them: as they are written, without their modules."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest

from fleetstart.runtime.handlers.validation_errors import type_name
from fleetstart.runtime.sdk.files import File


class Point(NamedTuple):
    x: int


class Item(msgspec.Struct):
    price: float


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Any, "anything"),
        (int, "int"),
        (Item, "Item (price)"),
        (list[File], "list[File]"),
        (list[Any], "list[Any]"),
        (File | None, "File | None"),
        (dict[str, list[Item]] | None, "dict[str, list[Item]] | None"),
        (tuple[datetime.date, ...], "tuple[date, ...]"),
        (Literal["a.b", 1], "Literal['a.b', 1]"),
        (Annotated[list[Point], msgspec.Meta(min_length=1)], "Annotated[list[Point], msgspec.Meta(min_length=1)]"),
    ],
)
def test_a_type_is_named_as_it_is_written(kind: Any, name: str) -> None:
    assert type_name(kind) == name
