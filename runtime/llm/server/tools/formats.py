"""Tool formats: how models of a family write calls, recognised by their chat template.

A template that renders no tools gets a system message with the tools in the format of Hermes, which many small models
have seen in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...text.tokenizer import ChatTemplate, Vocabulary
from ..output_format import with_options
from .requests import FunctionTool, ToolUse

MAX_FORCED_CALLS = 8
"""Calls in one forced answer: a model that repeats itself has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls: `begin`, JSON objects with a name and arguments, `end`."""

    name: str
    begin: str
    end: str = ""
    arguments: str = "arguments"
    """Key of the arguments."""
    opens: str = ""
    """Text between `begin` and the first object."""
    between: str = ", "
    closes: str = ""
    """Text between the last object and `end`."""
    one_per_block: bool = False
    """Whether each call has its own `begin` and `end`."""
    bare: bool = False
    """Whether a call may begin without `begin`, as the answer's first character."""
    short_ids: bool = False
    """Whether the template takes only ids of nine letters and digits."""
    own_prompt: bool = False
    """Whether the template renders no tools, so that a system message declares them."""


HERMES = ToolFormat(
    name="Hermes", begin="<tool_call>", end="</tool_call>", opens="\n", closes="\n", between="\n", one_per_block=True
)
LLAMA3 = ToolFormat(name="Llama 3", begin="<|python_tag|>", arguments="parameters", between="; ", bare=True)
MISTRAL = ToolFormat(name="Mistral", begin="[TOOL_CALLS]", opens="[", closes="]", short_ids=True)
PROMPTED = ToolFormat(
    name="Hermes, declared by a system message", begin=HERMES.begin, end=HERMES.end, opens="\n", closes="\n",
    between="\n", one_per_block=True, own_prompt=True,
)  # fmt: skip


def format_of(template: ChatTemplate) -> ToolFormat | None:
    """Format of a template's tools; None if it renders tools in a format that is not known here."""
    if not template.takes_tools:
        return PROMPTED
    source = template.tool_source
    if "[TOOL_CALLS]" in source:
        return None if "[ARGS]" in source else MISTRAL
    if "<|python_tag|>" in source:
        return LLAMA3
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    return None


def mark_tokens(form: ToolFormat, vocabulary: Vocabulary) -> dict[str, int]:
    """The format's marks that are one token."""
    encoded = {mark: vocabulary.encode(mark, add_special_tokens=False) for mark in (form.begin, form.end) if mark}
    return {mark: tokens[0] for mark, tokens in encoded.items() if len(tokens) == 1}


def shown_tokens(marks: Mapping[str, int], vocabulary: Vocabulary) -> dict[int, str]:
    """Special tokens among the marks: texts are decoded without them, and calls are read from the text."""
    return {token: mark for mark, token in marks.items() if not vocabulary.decode([token])}


def calls_grammar(
    use: ToolUse, form: ToolFormat, marks: Mapping[str, int], answer: dict[str, Any] | bool | None = None
) -> str:
    """Grammar of an answer that consists of calls, or else of a JSON text of the schema `answer`, if that is given."""
    # A bare call has no mark: that is for code.
    begin = "" if form.bare else _literal(form.begin, marks)
    block = f"{begin} {_block(use, form, marks)}"
    if form.one_per_block and use.parallel:
        block += f" ({_quoted(form.between)} {block}){{0,{MAX_FORCED_CALLS - 1}}}"
    lines = [f"start: {'calls' if answer is None else 'calls | answer'}", f"calls: {block}"]
    if answer is not None:
        lines.append(f"answer: %json {_schema(answer)}")
    return _grammar(lines, use, form)


def free_grammar(use: ToolUse, form: ToolFormat, marks: Mapping[str, int]) -> str:
    """Grammar of any text in which calls, if there are some, are those of the functions.

    After the mark there has to be a call. Its arguments follow the function's schema if the function is strict.
    """
    several = "*" if form.one_per_block and use.parallel else "?"
    block = _block(use, form, marks)
    if form.bare:
        lines = [f"start: {block} | TEXT", r"TEXT: /[ \n]*([^ \n{](.|\n)*)?/"]
    elif form.begin in marks:
        mark = marks[form.begin]
        # Text has no added tokens of its own, and a model may use others than the mark.
        free = [f"free: (TEXT | <[^{mark}]>)*", r"TEXT: /(.|\n)+/"]
        lines = [f"start: block{several} free", f"block: free <[{mark}]> {block}", *free]
    else:
        mark_pattern = re.escape(form.begin)
        without = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{mark_pattern}(.|\n)*/"
        until = rf"until[lazy]: /(.|\n)*{mark_pattern}/"
        lines = [f"start: block{several} TEXT", f"block: until {block}", until, without]
    return _grammar(lines, use, form)


def _block(use: ToolUse, form: ToolFormat, marks: Mapping[str, int]) -> str:
    """What follows a mark: a call, or several where the format has them in one block, and the block's end."""
    more = ""
    if use.parallel and not form.one_per_block:
        more = f"({_quoted(form.between)} call){{0,{MAX_FORCED_CALLS - 1}}}"
    return f"{_quoted(form.opens)} call {more} {_quoted(form.closes)} {_literal(form.end, marks)}"


def _grammar(lines: list[str], use: ToolUse, form: ToolFormat) -> str:
    calls = ["call: " + " | ".join(f"call_{number}" for number in range(len(use.tools)))]
    for number, tool in enumerate(use.tools):
        calls += _call_rules(number, tool, form, forced=use.forced)
    return msgspec.json.encode({"grammars": [{"lark_grammar": "\n".join([*lines, *calls])}]}).decode()


def _call_rules(number: int, tool: FunctionTool, form: ToolFormat, *, forced: bool) -> list[str]:
    """Rules of one function's calls. Its schema is a grammar of its own, so that its references stay valid."""
    head = f'{{"name": {_quoted(tool.name)}, "{form.arguments}": '
    call = f"call_{number}: {_quoted(head)} arguments_{number} {_quoted('}')}"
    schema = tool.schema if forced or tool.strict else {"type": "object"}
    return [call, f"arguments_{number}: %json {_schema(schema)}"]


def _schema(schema: dict[str, Any] | bool) -> str:
    return msgspec.json.encode(with_options(schema)).decode()


def _literal(mark: str, marks: Mapping[str, int]) -> str:
    """A mark in a grammar: as its token, since a text is never read as an added token, or else as text."""
    return f"<[{marks[mark]}]>" if mark in marks else _quoted(mark)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""
