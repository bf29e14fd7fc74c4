"""The table of request fields is what the bodies are read by, and knows every field of the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fleetstart.runtime.llm.server.requests import ChatCall, CompletionCall, PlainCall
from fleetstart.runtime.llm.server.responses_api.requests import ResponsesCall
from fleetstart.runtime.openai_api.call_reader import CallReader
from fleetstart.runtime.openai_api.embeddings import EmbeddingCall
from fleetstart.runtime.openai_api.invalid_parameter import InvalidParameter
from fleetstart.runtime.openai_api.request_fields import FIELDS, REFUSED_PARTS, RequestField, Route, of_route

KINDS: dict[Route, type[msgspec.Struct]] = {
    "chat": ChatCall, "completions": CompletionCall, "responses": ResponsesCall, "plain": PlainCall,
    "embeddings": EmbeddingCall,
}  # fmt: skip
SMALLEST: dict[Route, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "embeddings": {"input": "hi"},
    "plain": {"prompt": "hi"},
}


def read(route: Route, **fields: Any) -> object:
    reader: CallReader[Any] = CallReader(KINDS[route], route)
    return reader.read(json.dumps(SMALLEST[route] | fields).encode())


@pytest.mark.parametrize("route", KINDS)
def test_honoured_fields_are_those_that_the_structs_declare(route: Route) -> None:
    assert {field.name for field in of_route(route, "honoured")} == set(KINDS[route].__struct_fields__)


def test_no_field_is_listed_twice_for_a_route() -> None:
    listed = [(field.name, route) for field in FIELDS for route in field.routes]
    assert len(listed) == len(set(listed))


def test_every_field_of_the_client_is_listed() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params as text
    from openai.types import embedding_create_params as embeddings
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    clients: dict[Route, Any] = {
        "chat": chat.CompletionCreateParamsStreaming,
        "completions": text.CompletionCreateParamsStreaming,
        "embeddings": embeddings.EmbeddingCreateParams,
        "responses": responses.ResponseCreateParamsStreaming,
    }
    for route, params in clients.items():
        missing = set(params.__annotations__) - {field.name for field in FIELDS if route in field.routes}
        assert not missing, f"{route}: say of {sorted(missing)} whether they are supported"


REFUSED = [(field, route) for field in FIELDS if field.status == "refused" for route in field.routes]


@pytest.mark.parametrize(("field", "route"), REFUSED, ids=[f"{route}-{field.name}" for field, route in REFUSED])
def test_a_refused_field_is_named_with_the_reason_and_accepted_when_off(field: RequestField, route: Route) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(route, **{field.name: {"anything": 1}})
    assert caught.value.param == field.name
    assert field.name in str(caught.value)
    assert field.note in str(caught.value)
    for off in (None, False, [], {}, "", *field.off):
        read(route, **{field.name: off})


IGNORED = [(field, route) for field in FIELDS if field.status == "no effect" for route in field.routes]


@pytest.mark.parametrize(("field", "route"), IGNORED, ids=[f"{route}-{field.name}" for field, route in IGNORED])
def test_a_field_without_effect_takes_any_value(field: RequestField, route: Route) -> None:
    for value in ("x", 5, {"a": [1]}, True, None):
        read(route, **{field.name: value})


@pytest.mark.parametrize("kind", REFUSED_PARTS)
def test_a_part_that_is_no_text_is_refused_with_the_reason(kind: str) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(InvalidParameter) as caught:
        read("chat", messages=[{"role": "user", "content": parts}])
    assert REFUSED_PARTS[kind] in str(caught.value)
