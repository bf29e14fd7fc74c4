"""Interfaces read from source are what the runtime makes of the same handler when it runs."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetstart.controller.api.openapi.invoke_document import function_document
from fleetstart.controller.cli.handler.source.declarations import read_declarations
from fleetstart.controller.cli.handler.source.interface import batch_size, interface_of
from fleetstart.controller.schemas.examples import example
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.interface import Interface
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.function.tasks import TASKS
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version
from fleetstart.runtime.handlers.request_args import argument_decoder
from fleetstart.runtime.handlers.result_encoding import result_encoding_of
from fleetstart.runtime.pretrained import create_handler

BESIDE = """
import msgspec
LIMIT = 7
class Beside(msgspec.Struct, forbid_unknown_fields=True):
    "From another file."
    n: int = LIMIT
    again: "Beside | None" = None
"""
SOURCE = '''
import dataclasses
import datetime as dt
import decimal
import enum
import typing as t
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict, Union
from uuid import UUID

import msgspec
import pydantic
from msgspec import Meta

from beside import Beside
from fleetstart.runtime import File, InvalidInput, Response, batched, function

Score = Annotated[float, Meta(ge=0, le=1)]

class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"

@dataclasses.dataclass
class Point:
    "A place."
    x: int
    y: int = 0
    tags: list[str] = dataclasses.field(default_factory=list)
    kind: t.ClassVar[str] = "point"

@dataclasses.dataclass
class Point3(Point):
    z: Optional[float] = None

class Options(TypedDict, total=False):
    top: t.Required[int]
    mode: Literal["good", "fast"]

class Pair(NamedTuple):
    left: int
    right: str

class Everything(msgspec.Struct):
    point: Point3
    options: Options
    size: Size
    beside: Beside
    pair: Pair
    when: dt.datetime
    day: dt.date
    hour: dt.time
    span: dt.timedelta
    price: decimal.Decimal
    frozen: frozenset[int]
    bare: list
    flag: bool
    id: UUID
    either: Union[int, str, None]
    fixed: tuple[int, str]
    many: tuple[int, ...]
    names: set[str]
    by: dict[str, Score]
    blob: bytes
    anything: Any
    short: Annotated[str, Meta(min_length=1, max_length=5, pattern="^a")]
    few: Annotated[list[int], Meta(max_length=3)]
    choice: Literal[1, 2] = 1

@function
def everything(value: Everything) -> Everything:
    """Gives back what it got.

    And says so at length.
    """
    return value

@function
def fields(a: int, b: Score = 0.5, *, c: list[Point] | None = None) -> dict[str, int]: ...
@function
def nothing(): ...
@function
def untyped(request): ...
@function
def optional(point: Optional[Point] = None) -> Point | InvalidInput: ...
@function
def raw(data: bytes) -> bytes: ...
@function
def file(file: File) -> Response: ...
@function
def files(files: list[File], title: str) -> "Point": ...
@function
def stream(n: int) -> Iterator[Point]:
    yield Point(n)
@function
def stream_untyped(n: int):
    yield n
@function
async def stream_async(n: int) -> AsyncIterator[Beside]:
    yield Beside(n)
@function
@batched(max_size=8)
def batch(texts: list[str], points: list[Point]) -> list[Point]: ...
@function
@batched(max_size=4)
def batch_whole(points: list[Point]) -> list[float]: ...

class Base:
    def __call__(self, a: int) -> str:
        "Of the base."
@function
class Derived(Base):
    def load(self): ...

@function
async def asgi(scope, receive, send): ...
application = function(memory="64MiB")(lambda scope, receive, send: None)
async def scoped(scope, receive, send): ...
mounted = function(scoped)
def plain(a: int, b: str = ""): ...
assigned = function(memory="64MiB")(plain)
@function
def variable(*args): ...
@function
def computed(x: make_type()) -> "no such ( type": ...
'''
MODEL = """
import pydantic
from fleetstart.runtime import function
class Item(pydantic.BaseModel):
    count: int = pydantic.Field(ge=1, description="how many")
    name: str = pydantic.Field("x", alias="label", max_length=3)
    inner: "Item | None" = None
@function
def model(item: Item) -> Item: ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "beside.py").write_text(BESIDE)
    (folder / "typed_handler.py").write_text(SOURCE)
    (folder / "model_handler.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def interfaces(folder: Path) -> dict[str, Interface]:
    path = folder / "typed_handler.py"
    return {one.attribute: interface_of(path, one) for one in read_declarations(path)}


@pytest.fixture(scope="module")
def imported(folder: Path) -> Any:
    """The same file, run."""
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("typed_handler", folder / "typed_handler.py")
        assert spec is not None
        assert spec.loader is not None
        source = SOURCE.partition("@function\ndef computed")[0]
        module = importlib.util.module_from_spec(spec)
        sys.modules["typed_handler"] = module
        exec(compile(source, "typed_handler.py", "exec"), module.__dict__)
        yield module
    finally:
        sys.path.remove(str(folder))
        del sys.modules["typed_handler"]


def test_schemas_are_those_of_the_types_themselves(interfaces: dict[str, Interface], imported: Any) -> None:
    template = "#/components/schemas/{name}"
    (reference,), schemas = msgspec.json.schema_components([imported.Everything], ref_template=template)
    interface = interfaces["everything"]
    assert interface.input == interface.output == reference
    for name, schema in schemas.items():
        assert interface.schemas[name] == schema, name
    assert interface.description.startswith("Gives back what it got.")


FORMS = [
    *("everything", "fields", "nothing", "untyped", "optional", "raw", "file", "files", "batch", "batch_whole"),
    *("Derived", "assigned"),
]


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_the_one_that_the_worker_will_use(
    interfaces: dict[str, Interface], imported: Any, name: str
) -> None:
    handler = getattr(imported, name)
    inputs = argument_decoder(handler() if isinstance(handler, type) else handler, batched=name.startswith("batch"))
    assert interfaces[name].takes == {"raw": "bytes"}.get(inputs.mode, inputs.mode)
    if inputs.mode == "fields":
        needed = [parameter.name for parameter in inputs.parameters if parameter.required]
        assert interfaces[name].input["required"] == needed
        assert list(interfaces[name].input["properties"]) == [parameter.name for parameter in inputs.parameters]


def test_parameters_and_answers(interfaces: dict[str, Interface]) -> None:
    point = {"$ref": "#/components/schemas/Point"}
    fields = interfaces["fields"].input["properties"]
    assert fields["b"] == {"type": "number", "minimum": 0, "maximum": 1, "default": 0.5}
    assert fields["c"]["anyOf"][0] == {"type": "array", "items": point}
    assert interfaces["optional"].output == point
    assert (interfaces["raw"].gives, interfaces["file"].gives) == ("bytes", "response")
    assert interfaces["files"].files
    assert interfaces["files"].output == point
    assert (interfaces["stream"].gives, interfaces["stream"].output) == ("events", point)
    assert (interfaces["stream_untyped"].gives, interfaces["stream_untyped"].output) == ("events", {})
    assert interfaces["stream_async"].gives == "events"
    assert interfaces["batch"].input["properties"] == {"texts": {"type": "string"}, "points": point}
    assert interfaces["batch"].output == point
    assert interfaces["batch_whole"].input == point
    assert interfaces["Derived"].description == "Of the base."
    assert interfaces["asgi"].takes == "asgi"
    assert interfaces["application"].takes == interfaces["mounted"].takes == "asgi"
    assert interfaces["variable"].takes == "unknown"
    assert interfaces["computed"].input["properties"] == {"x": {}}


def test_a_pydantic_model_is_read_without_pydantic(folder: Path) -> None:
    path = folder / "model_handler.py"
    (declaration,) = read_declarations(path)
    item = interface_of(path, declaration).schemas["Item"]
    assert item["required"] == ["count"]
    assert item["properties"]["count"] == {"type": "integer", "minimum": 1, "description": "how many"}
    assert item["properties"]["label"] == {"type": "string", "maxLength": 3, "default": "x"}


def test_batches_are_known_to_the_deploy(folder: Path, tmp_path: Path) -> None:
    path = folder / "typed_handler.py"
    sizes = {one.attribute: batch_size(path, one) for one in read_declarations(path)}
    assert {name: size for name, size in sizes.items() if size} == {"batch": 8, "batch_whole": 4}
    computed = tmp_path / "handler.py"
    computed.write_text(
        "from fleetstart.runtime import batched, function\nimport os\n@function\n"
        "@batched(max_size=os.cpu_count())\ndef f(x: list[int]): ...\n"
    )
    with pytest.raises(InvalidSpec, match=r"handler.py:4: batched\(max_size=...\)"):
        batch_size(computed, read_declarations(computed)[0])


def test_schemas_that_would_burden_every_order_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    fields = "\n".join(f"    field_{n}: str" for n in range(3000))
    path.write_text(
        "import msgspec\nfrom fleetstart.runtime import function\n"
        f"class Wide(msgspec.Struct):\n{fields}\n@function\ndef f(wide: Wide): ...\n"
    )
    interface = interface_of(path, read_declarations(path)[0])
    assert (interface.takes, interface.schemas) == ("whole", {})
    assert "left out" in interface.description


# ── the document ───────────────────────────────────────────────────────────────────────────────────


def document(interface: Interface | None) -> dict[str, Any]:
    spec = FunctionSpec(name=FunctionName("f"), bundle=BundleId("0" * 64), entry="a:b", interface=interface)
    return function_document(spec, Version(3), "http://here/fn/f")


def test_every_interface_becomes_a_document_whose_references_lead_somewhere(interfaces: dict[str, Interface]) -> None:
    for interface in [*interfaces.values(), Interface(takes="llm", gives="response"), None]:
        made = document(interface)
        text = msgspec.json.encode(made).decode()
        for reference in text.split('"#/components/schemas/')[1:]:
            assert reference.partition('"')[0] in made["components"]["schemas"]
        for operations in made["paths"].values():
            for operation in operations.values():
                assert {"200", "400", "429", "500", "503", "504"} <= set(operation["responses"])


def test_what_fits_a_query_may_be_a_get(interfaces: dict[str, Interface]) -> None:
    assert "get" not in document(interfaces["fields"])["paths"]["/"], "a list of objects has no place in a query"
    assert [one["name"] for one in document(interfaces["stream"])["paths"]["/"]["get"]["parameters"]] == ["n"]


def test_files_are_sent_in_a_form(interfaces: dict[str, Interface]) -> None:
    body = document(interfaces["files"])["paths"]["/"]["post"]["requestBody"]
    assert list(body["content"]) == ["multipart/form-data"]
    assert set(document(interfaces["file"])["paths"]["/"]["post"]["requestBody"]["content"]) == {
        "application/octet-stream",
        "multipart/form-data",
    }


def test_an_app_describes_itself_where_the_document_says(interfaces: dict[str, Interface]) -> None:
    made = document(interfaces["asgi"])
    assert (made["paths"], made["externalDocs"]["url"]) == ({}, "http://here/fn/f/openapi.json")


def test_examples_fit_their_types(interfaces: dict[str, Interface], imported: Any) -> None:
    interface = interfaces["everything"]
    shown = example(interface.input, interface.schemas)
    # A pattern is not looked at, and that a text is a moment is not said.
    shown |= {"short": "abc", "when": "2026-01-02T03:04:05", "hour": "03:04:05"}
    assert msgspec.convert(shown, imported.Everything, strict=False).choice == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_task_of_transformers_has_the_interface_of_its_class(tmp_path: Path, task: str) -> None:
    """Read without an import of transformers, and the same that its worker will check calls by."""
    path = tmp_path / "handler.py"
    path.write_text(f"from fleetstart.runtime import Transformers\nx = Transformers(weights='w', task={task!r})\n")
    (declaration,) = read_declarations(path)
    found = interface_of(path, declaration)
    assert found.takes in ("fields", "bytes")
    assert found.output
    pytest.importorskip("transformers")
    handler = create_handler(declaration.settings)
    parameters = list(inspect.signature(handler).parameters)
    assert found.takes == "bytes" or list(found.input["properties"]) == parameters
    argument_decoder(handler)
    result_encoding_of(handler)
