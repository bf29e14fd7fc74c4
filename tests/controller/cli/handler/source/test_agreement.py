"""The schema that a deploy reads from source accepts exactly the requests that the worker of that source accepts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fleetstart.controller.cli.handler.source.declarations import read_declarations
from fleetstart.controller.cli.handler.source.interface import interface_of
from fleetstart.runtime.contract.errors import InvalidInput, InvalidSpec
from fleetstart.runtime.contract.function.interface import Interface
from fleetstart.runtime.handlers.request_args import ArgumentDecoder, argument_decoder

BESIDE = """
import enum
import re
from datetime import date
from decimal import Decimal
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict
import msgspec
from msgspec import Meta
from annotated_types import Ge
from pydantic import BaseModel, Field

LONGEST = 3
NOTHING = None
Share = Annotated[float, Meta(ge=0, le=1)]
Count = NewType("Count", int)

class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"

@dataclass
class Point:
    x: int
    y: Annotated[int, Meta(ge=0)] = 0
    label: Annotated[str, Field(description="shown, and nothing to check")] = ""
    names: list[str] = field(default_factory=list)
    dimensions: ClassVar[int] = 2

@dataclass
class Solid(Point):
    z: Optional["Solid"] = None

class Options(TypedDict, total=False):
    top: Share
    mode: Literal["good", "fast", 3]

class Strict(TypedDict):
    size: Size
    more: NotRequired[Options]

class Pair(NamedTuple):
    left: int
    right: str = ""

class Base(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    first_name: Annotated[str, Meta(max_length=LONGEST)]
    renamed: int = msgspec.field(default=1, name="other")

class Cat(Base, tag="cat"):
    lives: int = 9

class Dog(Base, tag="dog"):
    friends: list["Dog | Cat"] = []

@dataclass
class Limited:
    name: Annotated[str, Field(max_length=3)] = ""

@dataclass
class Defaulting:
    count: int = Field(default=1, ge=1)

class Held(TypedDict):
    limited: list[Limited]

@dataclass
class Loose:
    name: Annotated[str, Field(max_length=NOTHING, description="d")] = ""
    code: Annotated[str, re.compile("a+")] = ""
    price: Annotated[Decimal, Field(gt=Decimal(0))] = Decimal(1)
    on: Annotated[date, Ge(date(2020, 1, 1))] = date(2021, 1, 1)

class Row(msgspec.Struct, array_like=True):
    x: int = 0

@dataclass
class Sized:
    size: tuple[int, int] | Share = 1

@dataclass
class Secretive:
    __x: int = 1

class SizedModel(BaseModel):
    size: tuple[int, int] | Annotated[int, Field(ge=0)] = 1

class Model(BaseModel):
    limited: Limited | None = None
    either: Point | Solid | None = None
"""
NAMES = ("Size", "Point", "Solid", "Options", "Strict", "Pair", "Base", "Cat", "Dog", "Share", "Count")
OTHERS = ("Limited", "Defaulting", "Held", "Loose", "Row", "Model", "Sized", "SizedModel", "Secretive")
HEAD = f"""
from typing import Annotated, Any, Literal, Optional, Union
import typing as t
from msgspec import Meta
from pydantic import Field
from collections.abc import Iterable
from datetime import datetime
from beside import {", ".join((*NAMES, *OTHERS))}
from fleetstart.runtime import batched, function

class NoError: ...

@function
"""

ATOMS = st.sampled_from(
    (*NAMES, "int", "float", "str", "bool", "None", "Any", "dict", "list", "Cat | Dog", "Literal[1, 'a', None]")
)
WRITTEN = (
    "list[{}]", "dict[str, {}]", "t.Sequence[{}]", "tuple[{}, ...]", "tuple[{}, int]", "Optional[{}]", "{} | None",
    "Union[bool, {}]",
)  # fmt: skip
CONSTRAINED = (
    "Annotated[int, Meta(ge=1, lt=4)]", "Annotated[int | None, Field(gt=1)]", "Annotated[str, Field(max_length=2)]",
    "Annotated[Optional[str], Meta(pattern='^a')]", "Annotated[list[int], Meta(min_length=1)]",
    "Annotated[int, Meta(multiple_of=2), 'and more']",
)  # fmt: skip
ANNOTATIONS = st.recursive(
    ATOMS | st.sampled_from(CONSTRAINED),
    lambda inner: st.builds(str.format, st.sampled_from(WRITTEN), inner) | inner.map(repr),
    max_leaves=3,
)
PARAMETERS = st.lists(st.tuples(ANNOTATIONS, st.sampled_from(("", " = None", " = 1"))), min_size=1, max_size=3)


def signature(parameters: list[tuple[str, str]]) -> str:
    """Those with a default stand last, as Python has it."""
    ordered = sorted(parameters, key=lambda parameter: parameter[1] != "")
    named = [
        f"{name}{f': {kind}' if kind else ''}{default}" for name, (kind, default) in zip("abc", ordered, strict=False)
    ]
    return f"def handler({', '.join(named)}): ..."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from((0.5, 7.5)) | st.text("abs", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("x", "y", "a", "size")), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def near(draw: st.DrawFn, schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> Any:
    """A value that mostly fits the schema, and sometimes does not at one place."""
    if depth > 5 or draw(st.integers(0, 12)) == 0:
        return draw(JSON)
    if "$ref" in schema:
        return draw(near(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth + 1))
    if "anyOf" in schema:
        return draw(near(draw(st.sampled_from(schema["anyOf"])), schemas, depth + 1))
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]) | JSON)
    match schema.get("type"):
        case "object":
            found = {
                name: draw(near(kind, schemas, depth + 1))
                for name, kind in schema.get("properties", {}).items()
                if draw(st.integers(0, 8)) or name not in schema.get("required", ())
            }
            return found | ({"more": draw(JSON)} if draw(st.integers(0, 5)) == 0 else {})
        case "array":
            fixed = [draw(near(kind, schemas, depth + 1)) for kind in schema.get("prefixItems", ())]
            items = schema.get("items", {})
            return fixed + draw(st.lists(near(items or {}, schemas, depth + 1), max_size=1 if fixed else 3))
        case "integer":
            return draw(st.integers(-1, 5))
    return draw(JSON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("agreement")
    (folder / "beside.py").write_text(BESIDE)
    spec = importlib.util.spec_from_file_location("beside", folder / "beside.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["beside"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["beside"])
    yield folder
    del sys.modules["beside"]


def deployed(folder: Path, text: str) -> Interface:
    path = folder / "handler.py"
    path.write_text(HEAD + text)
    return interface_of(path, read_declarations(path)[0])


REFUSED = st.recursive(
    # Without Share: msgspec 0.22.0 crashes at a union of a fixed tuple and a number with limits.
    st.sampled_from(
        (*NAMES[:-2], *OTHERS, "int", "str", "datetime", "None", "Any", "dict", "Iterable[int]", "NoError")
    ),
    lambda inner: (
        st.builds(str.format, st.sampled_from(WRITTEN), inner) | st.builds("Union[{}, {}]".format, inner, inner)
    ),
    max_leaves=3,
)


def started(text: str) -> ArgumentDecoder | None:
    """What the worker makes of it; None if it does not start."""
    module = ModuleType("agreeing_handler")
    try:
        exec(compile(HEAD + text, "handler.py", "exec"), module.__dict__)
        return argument_decoder(module.__dict__["handler"])
    except TypeError:
        return None


def accepts(decoder: ArgumentDecoder, value: Any) -> bool:
    try:
        decoder.read(msgspec.json.encode(value), b"")
    except InvalidInput:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(parameters=PARAMETERS, data=st.data())
def test_the_schema_of_a_deploy_accepts_what_the_worker_accepts(
    folder: Path, parameters: list[tuple[str, str]], data: st.DataObject
) -> None:
    text = signature(parameters)
    interface = deployed(folder, text)
    decoder = started(text)
    assume(decoder is not None)
    assert decoder is not None
    assert interface.takes == {"raw": "bytes"}.get(decoder.mode, decoder.mode), text
    schema = {**interface.input, "components": {"schemas": interface.schemas}}
    validator = jsonschema_rs.Draft202012Validator(schema)
    for _ in range(6):
        value = data.draw(near(interface.input, interface.schemas))
        assert validator.is_valid(value) == accepts(decoder, value), (text, value, interface)


@pytest.mark.slow
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(kind=REFUSED)
def test_with_what_a_deploy_refuses_no_worker_starts_without_a_warning(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"def handler(a: {kind}, n: int = 0): ..."
    caplog.clear()
    try:
        deployed(folder, text)
    except InvalidSpec:
        assert started(text) is None or caplog.messages, text


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=REFUSED.filter(lambda kind: "NoError" not in kind and "None | None" not in kind))
def test_what_no_worker_starts_with_a_deploy_refuses(folder: Path, kind: str) -> None:
    """A deploy does where it can know: the source does not tell what `NoError` is, and Python makes no type of
    None | None."""
    text = f"def handler(a: {kind}, n: int = 0): ..."
    if started(text) is None:
        with pytest.raises(InvalidSpec):
            deployed(folder, text)


@pytest.mark.parametrize(
    ("kind", "said", "starts"),
    [
        ("Limited", r"beside.py:\d+: a constraint of pydantic", True),
        ("Defaulting", r"beside.py:\d+: a constraint of pydantic", True),
        ("dict[str, Held]", r"beside.py:\d+: a constraint of pydantic", True),
        ("list[Iterable[int]]", r"handler.py:\d+: parameter 'a' is to be iterated over", True),
        ("Point | Solid", r"handler.py:\d+: parameter 'a': .*union", False),
        ("datetime | str", r"handler.py:\d+: parameter 'a': .*union", False),
        ("list[int] | list[str]", r"handler.py:\d+: parameter 'a': .*union", False),
        ("Model | int", r"handler.py:\d+: parameter 'a': .*union", False),
        ("tuple[int, int] | Annotated[int, Meta(ge=0)]", r"parameter 'a' has a union of a tuple", False),
        ("Optional[tuple[str] | Annotated[str, Field(min_length=1)]]", r"parameter 'a' has a union of a tuple", False),
        ("dict[str, list[Sized]]", r"parameter 'a' has a union of a tuple", False),
    ],
)
def test_a_deploy_refuses_what_a_worker_cannot_start_with_or_warns_of(
    folder: Path, kind: str, said: str, starts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"def handler(a: {kind}, n: int = 0): ..."
    with pytest.raises(InvalidSpec, match=said) as caught:
        deployed(folder, text)
    assert caught.value.hint
    assert (started(text) is not None) == starts
    assert len(caplog.messages) == starts


@pytest.mark.parametrize(
    "kind",
    [
        "Model", "Model | None", "list[Point]", "Loose", "Point | Row", "Union[Point, Annotated[Point, 'too']]",
        "SizedModel", "Secretive", "tuple[int, ...] | Share", "tuple[int, Share] | str",
    ],
)  # fmt: skip
def test_a_deploy_takes_what_a_worker_starts_with(folder: Path, kind: str) -> None:
    """A pydantic model checks what is in it by its own rules; a limit that is computed is not known to a deploy."""
    text = f"def handler(a: {kind}, n: int = 0): ..."
    assert deployed(folder, text).takes == "fields"
    assert started(text) is not None


def test_an_answer_that_would_end_the_process_that_reads_its_type_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidSpec, match="the answer has a union of a tuple"):
        deployed(folder, "def handler(n: int) -> list[tuple[int, int] | Share]: ...")


@pytest.mark.parametrize("name", ["__x", "__dict__"])
def test_a_name_that_python_keeps_to_a_class_is_refused_where_it_would_be_a_field(folder: Path, name: str) -> None:
    with pytest.raises(
        InvalidSpec, match=f"handler.py:\\d+: parameter '{name}' has a name that Python keeps"
    ) as caught:
        deployed(folder, f"def handler({name}: int): ...")
    assert caught.value.hint
    assert started(f"def handler({name}: int): ...") is None
    whole = f"def handler({name}: dict[str, int]): ..."
    assert deployed(folder, whole).takes == "whole"
    assert started(whole) is not None
