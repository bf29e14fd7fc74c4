"""Schemas of functions and answers: what is followed as far as it can be, and what is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pydantic
import pytest

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.constraint import ConstraintCompiler
from fleetstart.runtime.llm.server.output_format import json_grammar, looping_reference, with_options
from fleetstart.runtime.llm.server.tools.formats import HERMES, QWEN_CODER, ToolFormat
from fleetstart.runtime.llm.server.tools.grammar import calls_grammar
from fleetstart.runtime.llm.server.tools.requests import FunctionTool, ToolUse
from tests.runtime.llm.models import byte_tokenizer, tiny
from tests.runtime.llm.server.test_openai_responses import Served, openai, served, user

CALL: dict[str, Any] = {"model": "chat", "messages": user("hi"), "max_tokens": 300, "temperature": 1.0, "seed": 3}


class Account(pydantic.BaseModel):
    """A model as applications have them: its schema has `uniqueItems` and the format `password`."""

    tags: set[bool]
    secret: pydantic.SecretStr = pydantic.Field(max_length=8)


LOOSE: list[dict[str, Any]] = [
    Account.model_json_schema(),
    {"properties": {"a": {"oneOf": [{"maxLength": 3, "type": "string"}, {"const": "x"}]}}, "required": ["a"]},
    {"properties": {"a": {"type": "boolean"}}, "propertyNames": {"maxLength": 4}, "additionalProperties": False},
    {"properties": {"a": {"type": "boolean"}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"properties": {"a": {"type": "array", "items": {"type": "null"}, "contains": {}, "maxItems": 2}}},
    {"properties": {"a": {"format": "made-up", "type": "string", "maxLength": 4}}, "required": ["a"]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny(max_position_embeddings=2048), LLMSettings(max_context_tokens=2048)) as subject:
        yield subject


def function(schema: dict[str, Any], *, name: str = "f", strict: bool | None = None) -> dict[str, Any]:
    given = {} if strict is None else {"strict": strict}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | schema} | given}


@pytest.mark.parametrize("schema", LOOSE, ids=lambda schema: next(iter(schema)))
def test_a_forced_call_takes_any_schema_of_a_function_that_is_not_strict(
    server: Served, schema: dict[str, Any]
) -> None:
    answer = server.client.chat.completions.create(**CALL, tools=[function(schema)], tool_choice="required")
    assert answer.choices[0].finish_reason in ("tool_calls", "length")


@pytest.mark.parametrize("schema", LOOSE, ids=lambda schema: next(iter(schema)))
def test_a_format_that_is_not_strict_takes_any_schema(server: Served, schema: dict[str, Any]) -> None:
    wanted = {"type": "object"} | schema
    answer = server.client.chat.completions.create(
        **CALL, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_what_can_be_followed_of_a_loose_schema_is(server: Served) -> None:
    schema = Account.model_json_schema()
    call = server.client.chat.completions.create(**CALL, tools=[function(schema)], tool_choice="required")
    arguments = json.loads(call.choices[0].message.tool_calls[0].function.arguments)
    del schema["properties"]["tags"]["uniqueItems"]
    jsonschema_rs.validate(schema, arguments)


@pytest.mark.parametrize("strict", [None, True])
def test_a_format_that_is_not_known_is_a_note(server: Served, strict: bool | None) -> None:
    # Names and values may be what keywords are called.
    fields = {"format": {"type": "string", "format": "password", "maxLength": 4}, "const": {"const": {"format": "no"}}}
    schema = {"properties": fields, "required": ["format", "const"], "additionalProperties": False}
    tools = [function(schema, strict=strict)]
    call = server.client.chat.completions.create(**CALL, tools=tools, tool_choice="required")
    arguments = json.loads(call.choices[0].message.tool_calls[0].function.arguments)
    assert arguments["const"] == {"format": "no"}
    assert set(arguments) == {"format", "const"}


def test_a_format_that_is_known_is_followed(server: Served) -> None:
    schema = {"properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    tools = [function(schema | {"additionalProperties": False}, strict=True)]
    call = server.client.chat.completions.create(**CALL, tools=tools, tool_choice="required")
    assert len(json.loads(call.choices[0].message.tool_calls[0].function.arguments)["day"]) == len("2026-01-31")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, "oneOf"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "look-around"),
    ],
)
def test_a_strict_function_is_refused_by_its_name_and_the_keyword(
    server: Served, schema: dict[str, Any], keyword: str
) -> None:
    sound = function({"properties": {"other": {"type": "string"}}}, name="sound", strict=True)
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(
            **CALL, tools=[sound, function(schema, name="wrong", strict=True)], tool_choice="required"
        )
    assert caught.value.param == "tools"
    message = str(caught.value.body["message"])
    assert message.startswith("tools: the schema of 'wrong'")
    assert keyword in message
    for inner in ("call_", "arguments_", "json_schema", "x-guidance", "coerce_one_of", "sound", " at "):
        assert inner not in message


def test_a_strict_format_beside_tools_is_refused_as_such(server: Served) -> None:
    wanted = {"name": "x", "schema": {"type": "array", "uniqueItems": True}, "strict": True}
    with pytest.raises(openai.BadRequestError, match=r"response_format: .*uniqueItems") as caught:
        server.client.chat.completions.create(
            **CALL, tools=[function({})], response_format={"type": "json_schema", "json_schema": wanted}
        )
    assert caught.value.param == "response_format"
    assert "start:" not in str(caught.value)


def test_responses_are_as_strict_as_they_say(server: Served) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "array", "uniqueItems": True, "maxItems": 1}}
    fields: dict[str, Any] = {"model": "chat", "input": "hi", "max_output_tokens": 30}
    server.client.responses.create(**fields, text={"format": wanted})
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        server.client.responses.create(**fields, text={"format": wanted | {"strict": True}})
    assert caught.value.param == "text"


def test_calls_in_tags_take_any_schema_of_a_function_that_is_not_strict() -> None:
    schema = {
        "type": "object", "minProperties": 1,
        "properties": {"a": {"type": "string", "pattern": "x+"}, "b": {"type": "array", "uniqueItems": True}},
    }  # fmt: skip
    use = ToolUse([FunctionTool("f", parameters=schema)], forced=True)
    compiler = ConstraintCompiler(byte_tokenizer, 258, frozenset({1}))
    compiler.compile(calls_grammar(use, QWEN_CODER, {}))
    noted = {"type": "object", "properties": {"a": {"type": "string", "format": "password"}}}
    strict = ToolUse([FunctionTool("f", parameters=noted, strict=True)], forced=True)
    compiler.compile(calls_grammar(strict, QWEN_CODER, {}))


def test_a_schema_of_too_many_levels_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer", "minimum": -1e30, "maximum": -1e29}
    for _ in range(200):
        schema = {"anyOf": [schema]}
    with pytest.raises(InvalidInput, match="more than 128 levels"):
        with_options(schema, strict=False)


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
BEYOND = [
    INT64, {"minimum": 2**64, "maximum": 2**64 + 5}, {"minimum": -1e30, "maximum": -1e29}, {"maximum": 1e300},
    {"minimum": -(2**63) + 1, "maximum": -(2**63) + 5}, {"exclusiveMinimum": -1e19, "exclusiveMaximum": -1e18},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bounds", BEYOND, ids=str)
def test_bounds_that_the_compiler_cannot_hold_have_no_effect_or_are_refused(bounds: dict[str, Any], kind: str) -> None:
    """Some of them ended the worker's process, others allowed other numbers."""
    schema = {"properties": {"minimum": {"type": kind} | bounds, "b": {"default": bounds}}, "required": ["minimum"]}
    compiler = ConstraintCompiler(byte_tokenizer, 258, frozenset({1}))
    given = with_options(schema, strict=False)
    assert isinstance(given, dict)
    assert given["properties"] == {"minimum": {"type": kind}, "b": {"default": bounds}}
    compiler.compile(json_grammar(given))
    with pytest.raises(InvalidInput, match="numbers are exact up to 9007199254740992: leave it out"):
        with_options(schema, strict=True)
    tool = FunctionTool("f", parameters=schema, strict=True)
    with pytest.raises(InvalidInput, match=r"tools: the schema of 'f': '.*m' is"):
        calls_grammar(ToolUse([tool], forced=True), QWEN_CODER, {})


@pytest.mark.parametrize("value", [-(2**63), [1, 2**53 + 1], {"a": [-(2**63) + 1]}], ids=str)
@pytest.mark.parametrize("key", ["const", "enum"])
def test_a_value_with_a_number_that_the_compiler_cannot_hold_is_refused(key: str, value: Any) -> None:
    given = {"properties": {"a": {key: [value] if key == "enum" else value}}}
    with pytest.raises(InvalidInput, match=f"'{key}' has the number -?9.*, and numbers are exact up to"):
        with_options(given, strict=False)


@pytest.mark.parametrize("multiples", [(2**31,), (1_000_003,), (0.1234567,), (65_521, 65_519)], ids=str)
def test_multiples_with_too_many_remainders_are_refused(multiples: tuple[float, ...]) -> None:
    """One of them took a worker's time and memory for good, and the interpreter with it."""
    given = {"type": "number", "allOf": [{"multipleOf": one} for one in multiples]}
    with pytest.raises(InvalidInput, match=r"'multipleOf' is [0-9., ]+: its digits, or their common multiple, exceed"):
        with_options(given, strict=False)


def test_multiples_as_applications_have_them_are_followed() -> None:
    multiples = [0.01, 0.5, 5, 15, 1e-6, 1000, 10**8, 1024, 0.25]
    given = with_options({"anyOf": [{"type": "number", "multipleOf": one} for one in multiples]}, strict=True)
    ConstraintCompiler(byte_tokenizer, 258, frozenset({1})).compile(json_grammar(given))


def test_bounds_that_the_compiler_can_hold_are_followed() -> None:
    schema = {"type": "integer", "minimum": -(2**53), "maximum": 2**53, "exclusiveMinimum": True}
    given = with_options(schema, strict=True)
    assert isinstance(given, dict)
    assert {key: given[key] for key in schema} == schema


LOOPS: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, "#"),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, "#/$defs/x"),
    (
        {
            "properties": {"a": {"type": "array", "items": {"allOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}}},
            "$defs": {"x": {"$ref": "#/$defs/y~1z"}, "y/z": {"allOf": [{"$ref": "#/properties/a/items/allOf/1"}]}},
        },
        "#/$defs/x",
    ),
]


@pytest.mark.parametrize(("schema", "reference"), LOOPS, ids=["root", "itself", "over others"])
@pytest.mark.parametrize("form", [HERMES, QWEN_CODER], ids=["hermes", "coder"])
def test_a_reference_that_leads_back_to_itself_is_refused_before_the_answer(
    schema: dict[str, Any], reference: str, form: ToolFormat
) -> None:
    wanted = f"tools: the schema of 'f': no text follows the $ref '{reference}', which leads back to itself"
    with pytest.raises(InvalidInput, match=re.escape(wanted)):
        calls_grammar(ToolUse([FunctionTool("f", parameters=schema)], forced=True), form, {})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"next": {"$ref": "#"}}},
        {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}, "$ref": "#/$defs/x"},
        {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {}}},
        {"const": {"$ref": "#"}, "enum": [{"$ref": "#/enum/0"}]},
        {"properties": {"$ref": {"type": "string"}, "allOf": {"$ref": "#/properties/$ref"}}},
    ],
)
def test_a_reference_that_ends_somewhere_is_none_of_a_loop(schema: dict[str, Any]) -> None:
    assert looping_reference(schema) == ""
