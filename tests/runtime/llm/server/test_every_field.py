"""Every field of the table of request fields, sent to a served model: honoured, without effect, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.openai_api.request_fields import FIELDS, REFUSED_PARTS, RequestField, Route
from tests.runtime.llm.server.test_openai_responses import Served, served
from tests.runtime.llm.server.tools.test_tools import TOOLS, family

PATHS: dict[Route, str] = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "plain": "/",
}  # fmt: skip
"""The routes of a language model."""
HI = [{"role": "user", "content": "hi"}]
LIMITED: dict[Route, dict[str, Any]] = {
    "chat": {"messages": HI, "max_tokens": 3, "seed": 1},
    "completions": {"prompt": "hi", "max_tokens": 3, "seed": 1},
    "responses": {"input": "hi", "max_output_tokens": 3, "temperature": 0},
    "plain": {"prompt": "hi", "max_tokens": 3, "seed": 1},
}
"""A short answer that is the same each time."""
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
TOOL_FIELDS: dict[str, Any] = {"tools": TOOLS, "tool_choice": "none"}
VALUES: dict[str, dict[str, Any]] = {
    "model": {"model": "chat"},
    "messages": {"messages": HI},
    "prompt": {"prompt": "hi"},
    "max_tokens": {"max_tokens": 2},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "logit_bias": {"logit_bias": {"5": 10}},
    "seed": {"seed": 7},
    "stop": {"stop": ["x", "y"]},
    "ignore_eos": {"ignore_eos": True},
    "n": {"n": 2},
    "best_of": {"best_of": 1},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "input": {"input": [{"role": "user", "content": "hi"}]},
    "instructions": {"instructions": "Be brief."},
    "max_output_tokens": {"max_output_tokens": 2},
    "text": {"text": {"format": {"type": "text"}}},
    "metadata": {"metadata": {"a": "b"}},
    "truncation": {"truncation": "disabled"},
    "include": {"include": ["message.output_text.logprobs"]},
    "response_format": {"response_format": {"type": "json_object"}},
    "tools": {"tools": TOOLS},
    "tool_choice": TOOL_FIELDS,
    "parallel_tool_calls": {"parallel_tool_calls": False},
}
"""A value of each honoured field, with the fields that it needs."""
OWN_VALUES: dict[tuple[Route, str], dict[str, Any]] = {
    ("plain", "messages"): {"messages": HI, "prompt": None},
    ("chat", "logprobs"): {"logprobs": True},
    ("completions", "logprobs"): {"logprobs": 2},
    ("responses", "top_logprobs"): {"top_logprobs": 2},
    ("responses", "tools"): {"tools": FLAT},
    ("responses", "tool_choice"): {"tools": FLAT, "tool_choice": "none"},
}
SENT = [(field, route) for field in FIELDS for route in field.routes if route in PATHS]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(family("Hermes"), LLMSettings(max_context_tokens=2048)) as subject:
        yield subject


@pytest.mark.parametrize(
    ("field", "route"), SENT, ids=[f"{route}-{field.name}-{field.status.replace(' ', '-')}" for field, route in SENT]
)
def test_each_field_is_what_the_table_says(server: Served, field: RequestField, route: Route) -> None:
    if field.status == "honoured":
        value = OWN_VALUES.get((route, field.name)) or VALUES[field.name]
    else:
        value = {field.name: {"a": [1]}}
    body = LIMITED[route] | value
    if route == "chat" and field.name == "max_completion_tokens":
        del body["max_tokens"]
    answer = server.http.post(PATHS[route], json=body)
    if field.status == "refused":
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (field.name, "invalid_request_error")
        assert field.note in error["message"]
        return
    assert answer.status_code == 200, answer.text
    if field.status == "no effect":
        assert _text(answer.json()) == _text(server.http.post(PATHS[route], json=LIMITED[route]).json())


def _text(answer: dict[str, Any]) -> str:
    """The generated text of any route's answer."""
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    if "choices" not in answer:
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("kind", REFUSED_PARTS)
def test_each_kind_of_part_is_refused_with_the_reason(server: Served, kind: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]
    answer = server.http.post(PATHS["chat"], json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert REFUSED_PARTS[kind] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [[5], []]}, "prompt"),
        ("completions", {"prompt": [1 << 20]}, "prompt"),
        ("completions", {"prompt": [5] * 2048, "max_tokens": 1}, "prompt"),
        ("embeddings", {"input": ["hi", ""]}, "input"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_an_error_of_its_field(
    server: Served, route: str, body: dict[str, Any], param: str
) -> None:
    answer = server.http.post(f"/v1/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_embeddings_have_their_own_fields(server: Served) -> None:
    answer = server.http.post("/v1/embeddings", json={"input": ["hi", "ho"], "encoding_format": "float"})
    assert [len(one["embedding"]) for one in answer.json()["data"]] == [64, 64]
    refused = server.http.post("/v1/embeddings", json={"input": "hi", "dimensions": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    tokens = server.http.post("/v1/embeddings", json={"input": [1, 2]})
    assert (tokens.status_code, tokens.json()["error"]["param"]) == (400, "input")
    assert "check_embedding_ctx_length=False" in tokens.json()["error"]["hint"]
