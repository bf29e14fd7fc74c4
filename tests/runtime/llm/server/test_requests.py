"""Bodies of calls: every field honoured, accepted as off, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.server.requests import ChatCall, CompletionCall, PlainCall
from fleetstart.runtime.openai_api.call_reader import CallReader
from fleetstart.runtime.openai_api.invalid_parameter import InvalidParameter

CHAT, TEXT, PLAIN = (
    CallReader(ChatCall, "chat"),
    CallReader(CompletionCall, "completions"),
    CallReader(PlainCall, "plain"),
)
VOCAB = 258
MESSAGES = [{"role": "user", "content": "hi"}]
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}


def chat(**fields: Any) -> ChatCall:
    return CHAT.read(json.dumps({"messages": MESSAGES} | fields).encode())


def text(**fields: Any) -> CompletionCall:
    return TEXT.read(json.dumps({"prompt": "hi"} | fields).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [*MESSAGES, {"role": "x", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "system"}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "1", "tool_call_id": "a"}]}, "messages[1].tool_call_id"),
        ({"messages": [CALLED, {"role": "tool", "content": "1", "tool_call_id": "b"}]}, "messages[1].tool_call_id"),
        ({"messages": [CALLED, {"role": "tool", "content": "1"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 1 << 70}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"frobnicate": True}}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_wrong_fields_of_a_chat_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    def read_all() -> None:
        call = chat(**fields)
        call.params(SamplingParams(), VOCAB)
        call.stops()
        call.limit()

    with pytest.raises(InvalidParameter) as caught:
        read_all()
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_wrong_fields_of_a_completion_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        text(**fields).prompts()
    assert caught.value.param == param


def test_what_means_off_is_accepted() -> None:
    call = chat(
        n=1, stream=False, logprobs=False, top_logprobs=None, logit_bias={}, tools=[], tool_choice="none", stop=None,
        response_format={"type": "text"}, modalities=["text"], user="me", metadata={"a": "b"}, store=False,
        parallel_tool_calls=True, service_tier="auto", temperature=None, seed=None,
    )  # fmt: skip
    assert call.params(SamplingParams(temperature=0.3), VOCAB) == SamplingParams(temperature=0.3)
    assert text(echo=False, suffix=None, best_of=1, logprobs=None).prompts() == ["hi"]


def test_defaults_give_way_to_what_is_asked() -> None:
    defaults = SamplingParams(temperature=0.7, top_k=40, top_p=0.9)
    asked = chat(temperature=0, top_k=-1, top_p=1, presence_penalty=1, frequency_penalty=0.5, seed=-3)
    assert asked.params(defaults, VOCAB) == SamplingParams(
        temperature=0, top_k=0, top_p=1, presence_penalty=1, frequency_penalty=0.5, seed=-3
    )
    assert chat().params(defaults, VOCAB) == defaults


def test_both_names_of_the_limit() -> None:
    assert chat().limit() is None
    assert chat(max_tokens=5).limit() == 5
    assert chat(max_completion_tokens=6).limit() == 6
    assert chat(max_tokens=6, max_completion_tokens=6).limit() == 6
    assert text().limit() == 16
    assert text(max_tokens=5).limit() == 5


def test_prompts_in_every_form() -> None:
    assert text(prompt="a").prompts() == ["a"]
    assert text(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert text(prompt=[5, 6]).prompts() == [[5, 6]]
    assert text(prompt=[[5, 6], [7]]).prompts() == [[5, 6], [7]]
    assert text(prompt=[[5], "a"]).prompts() == [[5], "a"]


def test_messages_in_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None, "refusal": None}])
    assert [message.plain() for message in call.messages] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": MESSAGES}, {"messages": []}])
def test_a_plain_call_takes_one_of_prompt_and_messages(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="one of prompt and messages"):
        PLAIN.read(json.dumps(fields).encode())


@given(st.binary(max_size=60))
def test_no_body_is_anything_but_read_or_refused(body: bytes) -> None:
    for reader in (CHAT, TEXT, PLAIN):
        with pytest.raises(InvalidParameter):
            reader.read(body)


def test_a_deeply_nested_body_is_refused() -> None:
    with pytest.raises(InvalidParameter):
        CHAT.read(b'{"messages":' + b"[" * 100_000)
    with pytest.raises(InvalidParameter):
        CHAT.read(b'{"messages":[{"role":"user","content":"x"}],"metadata":' + b"[" * 100_000)


def test_messages_of_every_role_are_read() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}
    others = [{"role": role, "content": ""} for role in ("system", "developer", "user", "assistant", "function")]
    messages = chat(messages=[*others, CALLED, result, refusal, {"role": "assistant", "refusal": "Never."}]).messages
    assert [message.plain()["content"] for message in messages[-3:]] == ["1", "No.", "Never."]


def test_messages_of_the_plain_route_are_checked_alike() -> None:
    with pytest.raises(InvalidParameter, match=r"messages\[0\].role: 'x' is none of system, "):
        PLAIN.read(json.dumps({"messages": [{"role": "x", "content": "hi"}]}).encode())
