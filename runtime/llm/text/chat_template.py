"""Chat template of a checkpoint: renders messages by its Jinja template, in a sandbox, since it may be untrusted.

A template can compute without end, and all calls of its worker would wait for it: one rendering has a limit of
processor time, which each turn of a loop and each call looks at, and products and powers have a size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec
from jinja2 import TemplateError, meta, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...contract.decoding import UNDECODABLE
from ...contract.errors import CheckpointInvalid, InvalidInput

RENDER_S = 1.0
"""Most processor time of one rendering. Templates that look at all messages before each one take half a second for a
thousand messages."""
LENGTH_MOST = 1 << 20
"""Most items or characters of what a product repeats, and bits of a number that is a product or a power."""
LOOK_TURNS = 64
"""Turns between two looks at the clock, each of which takes as long as a turn."""
_TIME, _TIMED = "__time", "__timed"

_FAULTS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Errors that a template's own expressions raise, when it is compiled, which computes constants, or rendered."""


class _GenerationTag(Extension):
    """`{% generation %}` around what a model answers, with which transformers masks training data: it is shown as it
    is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 has it so

    def parse(self, parser: Parser) -> nodes.Node:
        begin = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=begin)


class _RenderTime:
    """Processor time that one rendering may still take, in its thread."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + RENDER_S
        self._turns = 0

    def look(self) -> None:
        """Looks at the clock now and then. Errors: TemplateError after the end."""
        self._turns += 1
        if self._turns % LOOK_TURNS == 0 and time.thread_time() > self._end_s:
            raise TemplateError(f"it computes for more than {RENDER_S:g} s")


def _turns(values: Iterable[Any], left: _RenderTime) -> Iterator[Any]:
    for value in values:
        left.look()
        yield value


@pass_context
def _timed(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """The values that a loop goes through, in the time of its rendering."""
    return _turns(values, context[_TIME])


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox whose templates end."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters |= {"tojson": _tojson, _TIMED: _timed}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
        return template

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        left = context[_TIME]
        left.look()
        if isinstance(called, LoopContext) and args:  # a loop that begins anew, with what is inside
            args = (_turns(args[0], left), *args[1:])
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > LENGTH_MOST:
            raise TemplateError(f"a {'product' if operator == '*' else 'power'} in it is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """About how many items or bits a product or a power has."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    number, values = (left, right) if isinstance(left, int) else (right, left)
    return number * len(values) if isinstance(number, int) and hasattr(values, "__len__") else 0


class ChatTemplate:
    """Chat template of a model: renders messages. Errors: InvalidInput if the template rejects them."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str | None = None) -> None:
        """`tool_source`: template of chats with tools, if the model has one of its own for them."""
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
            self._tool_template = self._template if tool_source is None else self._environment.from_string(tool_source)
        except _FAULTS as error:
            raise CheckpointInvalid(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self.tool_source = source if tool_source is None else tool_source

    @cached_property
    def takes_tools(self) -> bool:
        """Checks whether the template renders tools."""
        return "tools" in meta.find_undeclared_variables(self._environment.parse(self.tool_source))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        given = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _TIME: _RenderTime(),
        }
        try:
            return (self._template if tools is None else self._tool_template).render(given | self._special_tokens)
        except _FAULTS as error:
            raise InvalidInput(f"messages: the model's chat template refuses them: {error}") from error


def read_chat_template(tokenizer_config: bytes | None, template: bytes | None) -> ChatTemplate | None:
    """Reads the chat template from chat_template.jinja or else tokenizer_config.json; None without either."""
    try:
        config = msgspec.json.decode(tokenizer_config, type=dict[str, Any]) if tokenizer_config else {}
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"tokenizer_config.json is not a JSON object: {error}") from error
    source: Any = template.decode(errors="replace") if template is not None else config.get("chat_template")
    tool_source = None
    if isinstance(source, list):  # several templates by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source, tool_source = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        return None
    special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return ChatTemplate(source, special, tool_source if isinstance(tool_source, str) else None)


def _content(token: Any) -> str:
    """Text of a special token, which is a string or an object with `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    """The present time, which templates tell their models."""
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates are written for: with the spaces of Python's own encoder, and letters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
