"""Calls in a model's text: found in the formats of several families, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.llm.server.tools.formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from fleetstart.runtime.llm.server.tools.parser import ParsedAnswer, ToolParser

FORMATS = [HERMES, LLAMA3, MISTRAL]


def parsed(form: ToolFormat, text: str, cuts: list[int] | None = None, *, parallel: bool = True) -> ParsedAnswer:
    parser, answer = ToolParser(form, parallel=parallel), ParsedAnswer()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    for begin, end in itertools.pairwise(places):
        for part in parser.feed(text[begin:end]):
            answer.add(part)
    for part in parser.flush():
        answer.add(part)
    assert parser.called is bool(answer.calls)
    return answer


def calls(form: ToolFormat, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    answer = parsed(form, text, **options)
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "found"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, 'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "Let me see.", [("f", "{}")]),
        (
            HERMES,
            '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g"}\n</tool_call>',
            "",
            [("f", '{"a": "}"}'), ("g", "{}")],
        ),
        (HERMES, '<tool_call>[{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]</tool_call>',
         "", [("f", '{"a": [1]}'), ("g", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": {"b": "\\"}"}}, "name": "f"}</tool_call>', "",
         [("f", '{"a": {"b": "\\"}"}}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (HERMES, "A tag <tool_ and more", "A tag <tool_ and more", []),
        (HERMES, "ends with <tool", "ends with <tool", []),
        (HERMES, "<tool_call>", "<tool_call>", []),
        (HERMES, "<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>", []),
        (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
        (HERMES, '<tool_call>{"name": "f"}</tool_c', "", [("f", "{}")]),
        (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (LLAMA3, '\n<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}', "",
         [("f", "{}"), ("g", '{"b": 2}')]),
        (LLAMA3, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (LLAMA3, '{"city": "Paris"}', '{"city": "Paris"}', []),
        (LLAMA3, "Hi {you}", "Hi {you}", []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "",
         [("f", '{"a": 1}'), ("g", "{}")]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
    ],
)  # fmt: skip
def test_texts_of_each_family(form: ToolFormat, text: str, content: str, found: list[tuple[str, str]]) -> None:
    assert calls(form, text) == (content, found)
    assert calls(form, text, cuts=list(range(len(text)))) == (content, found)


def test_one_call_is_taken_where_one_is_allowed() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call> and text'
    assert calls(HERMES, text, parallel=False) == ("", [("f", "{}")])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=4), JSON_VALUES)),
    min_size=1,
    max_size=3,
)


def written(form: ToolFormat, made: list[tuple[str, Any]], indent: int | None) -> str:
    objects = [json.dumps({"name": name, form.arguments: given}, indent=indent) for name, given in made]
    if form.one_per_block:
        return form.between.join(f"{form.begin}{form.opens}{one}{form.closes}{form.end}" for one in objects)
    return f"{form.begin}{form.opens}{form.between.join(objects)}{form.closes}{form.end}"


@given(
    form=st.sampled_from(FORMATS), made=CALLS, indent=st.none() | st.integers(0, 2), cuts=st.lists(st.integers(0, 999))
)
def test_any_calls_are_read_in_any_pieces(
    form: ToolFormat, made: list[tuple[str, Any]], indent: int | None, cuts: list[int]
) -> None:
    content, found = calls(form, "Well." + written(form, made, indent), cuts=cuts)
    assert content == "Well."
    assert [(name, json.loads(text)) for name, text in found] == made


NOISE = st.text(st.sampled_from('<tool_call>/{}[]":,\\ namerguts\n|python_tTOOLC1'), max_size=60)


@given(form=st.sampled_from(FORMATS), text=NOISE, cuts=st.lists(st.integers(0, 99)))
def test_noise_is_parsed_the_same_in_any_pieces(form: ToolFormat, text: str, cuts: list[int]) -> None:
    whole = calls(form, text)
    assert calls(form, text, cuts=cuts) == whole
    if not whole[1]:
        assert "".join(whole[0].split()) == "".join(text.split()), "text without calls is content"
