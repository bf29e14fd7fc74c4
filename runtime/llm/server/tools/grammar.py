"""Grammars of answers with tool calls: of forced calls, and of those that strict functions allow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ....contract.errors import InvalidInput
from ....openai_api.invalid_parameter import InvalidParameter
from ..output_format import followable, with_options
from .formats import ToolFormat
from .named_call import ARGUMENTS_MARK, ID_MARK
from .parameter_call import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from .parameter_values import parameters_of, resolved, value_types
from .requests import FunctionTool, ToolUse

MAX_FORCED_CALLS = 8
"""Calls in one forced answer: a model that repeats itself has to end."""
NEWLINE = "\n"
_KEY = re.compile(r"[^<>\n]+")
_CALL_ID = "/[A-Za-z0-9]{9}/"
_NOTES = ("title", "description")
_ROOT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$schema", "$defs", "definitions", *_NOTES)
)
"""Keys of a strict function's schema that parameters in tags can follow, or need not."""
_TEXT_KEYS = frozenset(("type", "default", "examples", "minLength", "maxLength", "enum", "const", *_NOTES))
"""Keys of a text's schema that a value without quotation marks can follow, or need not; of strict functions."""


def calls_grammar(
    use: ToolUse, form: ToolFormat, marks: Mapping[str, int], answer: dict[str, Any] | bool | None = None
) -> str:
    """Grammar of an answer that consists of calls, or else of a JSON text of the schema `answer`, if that is given.

    `answer` has the compiler's options.
    """
    # A bare call has no mark: that is for code.
    begin = "" if form.bare else _literal(form.begin, marks)
    block = f"{begin} {_block(use, form, marks)}"
    if form.one_per_block and use.parallel:
        block += f" ({_quoted(form.between)} {block}){{0,{MAX_FORCED_CALLS - 1}}}"
    lines = [f"start: {'calls' if answer is None else 'calls | answer'}", f"calls: {block}"]
    if answer is not None:
        lines.append(f"answer: %json {msgspec.json.encode(answer).decode()}")
    return _grammar(lines, use, form, marks)


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
    return _grammar(lines, use, form, marks)


def followed_schemas(use: ToolUse) -> Iterator[tuple[str, dict[str, Any] | bool]]:
    """The functions whose calls follow a schema: names and schemas with the compiler's options."""
    for tool in use.tools:
        if _follows(use, tool):
            yield tool.name, _with_options(tool.schema, tool)


def _follows(use: ToolUse, tool: FunctionTool) -> bool:
    return use.forced or bool(tool.strict)


def _block(use: ToolUse, form: ToolFormat, marks: Mapping[str, int]) -> str:
    """What follows a mark: a call, or several where the format has them in one block, and the block's end."""
    more = ""
    if use.parallel and not form.one_per_block:
        more = f"({_quoted(form.between)} call){{0,{MAX_FORCED_CALLS - 1}}}"
    return f"{_quoted(form.opens)} call {more} {_quoted(form.closes)} {_literal(form.end, marks)}"


def _grammar(lines: list[str], use: ToolUse, form: ToolFormat, marks: Mapping[str, int]) -> str:
    calls = ["call: " + " | ".join(f"call_{number}" for number in range(len(use.tools)))]
    for number, tool in enumerate(use.tools):
        held = _follows(use, tool)
        match form.kind:
            case "object":
                calls += _object_rules(number, tool, form, held=held)
            case "named":
                calls += _named_rules(number, tool, form, marks, held=held)
            case "parameters":
                calls += _parameter_rules(number, tool, held=held)
    return msgspec.json.encode({"grammars": [{"lark_grammar": "\n".join([*lines, *calls])}]}).decode()


def _object_rules(number: int, tool: FunctionTool, form: ToolFormat, *, held: bool) -> list[str]:
    """Rules of one function's calls. Its schema is a grammar of its own, so that its references stay valid."""
    head = f'{{"name": {_quoted(tool.name)}, "{form.arguments}": '
    call = f"call_{number}: {_quoted(head)} arguments_{number} {_quoted('}')}"
    return [call, _arguments_rule(number, tool, held=held)]


def _named_rules(
    number: int, tool: FunctionTool, form: ToolFormat, marks: Mapping[str, int], *, held: bool
) -> list[str]:
    id = f"{_literal(ID_MARK, marks)} {_CALL_ID} " if form.call_ids else ""
    call = f"call_{number}: {_quoted(tool.name)} {id}{_literal(ARGUMENTS_MARK, marks)} arguments_{number}"
    return [call, _arguments_rule(number, tool, held=held)]


def _arguments_rule(number: int, tool: FunctionTool, *, held: bool) -> str:
    return f"arguments_{number}: %json {_schema(tool.schema if held else {'type': 'object'}, tool)}"


def _parameter_rules(number: int, tool: FunctionTool, *, held: bool) -> list[str]:
    """Rules of calls whose parameters are tags, in the order of the schema. Errors: InvalidParameter."""
    name = f"call_{number}"
    begin, end = _quoted(f"{FUNCTION}{tool.name}>\n"), _quoted(FUNCTION_END)
    if not held:
        any_parameter = rf"({_quoted(PARAMETER)} /[^<>\n]+/ {_quoted('>' + NEWLINE)} {name}_any)*"
        return [f"{name}: {begin} {any_parameter} {end}", *_text_rules(f"{name}_any", {})]
    with _named(tool):
        root = followable(tool.schema, strict=bool(tool.strict))
    if tool.strict and (unknown := sorted(set(root) - _ROOT_KEYS)):
        raise _cannot_follow(tool, f"{unknown[0]!r} of its parameters")
    required = root.get("required") or ()
    body, rules = [], []
    for place, (key, schema) in enumerate(parameters_of(root).items()):
        if not _KEY.fullmatch(key):
            raise _cannot_follow(tool, f"the name {key!r} of a parameter")
        value = f"{name}_{place}"
        tag = f"{_quoted(f'{PARAMETER}{key}>' + NEWLINE)} {value}"
        body.append(tag if key in required else f"({tag})?")
        rules += _value_rules(value, key, schema, root, tool)
    return [f"{name}: {begin} {' '.join(body)} {end}", *rules]


def _value_rules(rule: str, key: str, schema: Any, root: dict[str, Any], tool: FunctionTool) -> list[str]:
    """Rules of one parameter's value and of what ends it. `root`: the schema of all parameters."""
    if "string" not in value_types(schema, root):
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        whole = schema | definitions if isinstance(schema, dict) else schema
        return [
            f"{rule}: {rule}_json {_quoted(NEWLINE + PARAMETER_END + NEWLINE)}",
            f"{rule}_json: %json {_schema(whole, tool)}",
        ]
    own = resolved(schema, root)
    own = own if isinstance(own, dict) else {}
    only_text = value_types(schema, root) == {"string"}
    if tool.strict and only_text and (unknown := sorted(set(own) - _TEXT_KEYS)):
        raise _cannot_follow(tool, f"{unknown[0]!r} of the text {key!r}")
    return _text_rules(rule, own)


def _text_rules(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Rules of a value that is text, up to the tag that ends it."""
    end = NEWLINE + PARAMETER_END + NEWLINE
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        texts = [one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in choices]
        return [f"{rule}: ({' | '.join(map(_quoted, texts))}) {_quoted(end)}"]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    mark = re.escape(PARAMETER_END).replace("/", r"\/")
    text = f"{rule.upper()}_TEXT"
    return [
        f"{rule}[lazy]: {text} {_quoted(end)}",
        rf"{text}: /(.|\n){{{least},{most}}}/ & ~/(.|\n)*{mark}(.|\n)*/",
    ]


def _cannot_follow(tool: FunctionTool, what: str) -> InvalidParameter:
    return InvalidParameter(
        f"tools: in the format of this model, calls of {tool.name!r} cannot follow {what}: change it"
        + (", or leave out strict" if tool.strict else ", or do not force the call"),
        "tools",
    )


def _schema(schema: dict[str, Any] | bool, tool: FunctionTool) -> str:
    return msgspec.json.encode(_with_options(schema, tool)).decode()


def _with_options(schema: dict[str, Any] | bool, tool: FunctionTool) -> dict[str, Any] | bool:
    """A schema of a function with the compiler's options. Errors: InvalidParameter."""
    with _named(tool):
        return with_options(schema, strict=bool(tool.strict))


@contextmanager
def _named(tool: FunctionTool) -> Iterator[None]:
    """Names the function in errors about its schema."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidParameter(f"tools: the schema of {tool.name!r}: {error.message}", "tools") from error


def _literal(mark: str, marks: Mapping[str, int]) -> str:
    """A mark in a grammar: as its token, since a text is never read as an added token, or else as text."""
    return f"<[{marks[mark]}]>" if mark in marks else _quoted(mark)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""
