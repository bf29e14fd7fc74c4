"""Calls in a model's text: found in the formats of several families, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.llm.server.tools.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    MISTRAL_NAMED_IDS,
    QWEN_CODER,
    ToolFormat,
)
from fleetstart.runtime.llm.server.tools.parser import ParsedAnswer, ToolParser

FORMATS = [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, MISTRAL_NAMED_IDS, QWEN_CODER]
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "more": {"$ref": "#/$defs/more"},
    },
    "$defs": {"more": {"type": ["array", "object", "boolean", "null"]}},
}


def parsed(form: ToolFormat, text: str, cuts: list[int] | None = None, *, parallel: bool = True) -> ParsedAnswer:
    parser, answer = ToolParser(form, parallel=parallel, schemas={"f": SCHEMA}), ParsedAnswer()
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
        (HERMES, "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
        (HERMES, "<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>", []),
        (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
        (HERMES, '<tool_call>{"name": "f"}</tool_c', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>\n<tool_call>\n{"', "", [("f", "{}")]),
        (MISTRAL_NAMED, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[AR", "", [("f", "{}")]),
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
        (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"a": "}[ARGS]"}', "", [("f", '{"a": "}[ARGS]"}')]),
        (MISTRAL_NAMED, 'Well.\n[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{}', "Well.",
         [("f", '{"a": 1}'), ("g", "{}")]),
        (MISTRAL_NAMED, "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
        (MISTRAL_NAMED, "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
        (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"a": [1', "", [("f", '{"a": [1')]),
        (MISTRAL_NAMED, "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", []),
        (MISTRAL_NAMED_IDS, "[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS] {}\n", "", [("f", "{}")]),
        (QWEN_CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        (QWEN_CODER, "Let me see.\n\n<tool_call>\n<function=f>\n"
         "<parameter=text>\na \"line\"\n\nand </param\n</parameter>\n"
         "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n", "Let me see.",
         [("f", '{"text": "a \\"line\\"\\n\\nand </param", "count": 3}')]),
        (QWEN_CODER, "<tool_call><function=f><parameter=text>5</parameter><parameter=maybe>null</parameter>"
         "<parameter=more>[True]</parameter><parameter=other>7</parameter></function></tool_call>", "",
         [("f", '{"text": "5", "maybe": null, "more": "[True]", "other": "7"}')]),
        (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=more>\nFalse\n</parameter>\n</function>\n</tool_call>\n"
         "<tool_call>\n<function=g>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>", "",
         [("f", '{"more": false}'), ("g", '{"x": "{}"}')]),
        (QWEN_CODER, '<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
        (QWEN_CODER, "<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
        (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=text>\nhalf", "", [("f", '{"text": "half')]),
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
LETTERS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<>/=\n"), max_size=12)
TYPED = st.fixed_dictionaries(
    {},
    optional={
        "text": LETTERS.filter(lambda text: "</parameter>" not in text),
        "count": st.integers(-99, 99),
        "maybe": st.none() | st.sampled_from(["", "a", "null and void", "{x"]),
        "more": st.lists(st.integers(0, 9), max_size=2) | st.booleans() | st.none(),
    },
)
"""Arguments of SCHEMA."""


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[ToolFormat, str, list[tuple[str, Any]]]:
    """Calls as a model of a family writes them, and what they are."""
    form = draw(st.sampled_from(FORMATS))
    if form.kind == "parameters":
        made = draw(st.lists(st.tuples(st.just("f"), TYPED), min_size=1, max_size=3))
        return form, form.between.join(_in_tags(form, given) for _, given in made), made
    names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    made = draw(st.lists(st.tuples(names, st.dictionaries(st.text(max_size=4), JSON_VALUES)), min_size=1, max_size=3))
    indent = draw(st.none() | st.integers(0, 2))
    if form.kind == "named":
        id = "[CALL_ID]a1B2c3D4e" if form.call_ids else ""
        texts = [f"{form.begin}{name}{id}[ARGS]{json.dumps(given, indent=indent)}" for name, given in made]
        return form, "".join(texts), made
    objects = [json.dumps({"name": name, form.arguments: given}, indent=indent) for name, given in made]
    if form.one_per_block:
        text = form.between.join(f"{form.begin}{form.opens}{one}{form.closes}{form.end}" for one in objects)
    else:
        text = f"{form.begin}{form.opens}{form.between.join(objects)}{form.closes}{form.end}"
    return form, text, made


def _in_tags(form: ToolFormat, given: dict[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{form.begin}{form.opens}<function=f>\n{tags}</function>{form.closes}{form.end}"


@pytest.mark.slow
@given(written=written_calls(), cuts=st.lists(st.integers(0, 999)))
def test_any_calls_are_read_in_any_pieces(
    written: tuple[ToolFormat, str, list[tuple[str, Any]]], cuts: list[int]
) -> None:
    form, text, made = written
    content, found = calls(form, "Well." + text, cuts=cuts)
    assert content == "Well."
    assert [(name, json.loads(text)) for name, text in found] == made


NOISE = st.text(st.sampled_from('<tool_call>/{}[]":,\\ namerguts\n|python_tTOOLC1=f'), max_size=60)
PIECES = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>"])
    | st.sampled_from(["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "{", "}", '"', "f", "\n", " ", "7", "<|python_tag|>"]),
    max_size=14,
).map("".join)
"""Marks and letters in any order."""


@given(form=st.sampled_from(FORMATS), text=NOISE | PIECES, cuts=st.lists(st.integers(0, 99)))
def test_noise_is_parsed_the_same_in_any_pieces(form: ToolFormat, text: str, cuts: list[int]) -> None:
    whole = calls(form, text)
    assert calls(form, text, cuts=cuts) == whole
    if not whole[1]:
        assert "".join(whole[0].split()) == "".join(text.split()), "text without calls is content"
