"""Tokenizer, streaming detokenizer and chat template.

The tokenizer is the `tokenizers` library over the checkpoint's tokenizer.json; chats are rendered by the checkpoint's
Jinja template in a sandbox, since the checkpoint may be untrusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import tokenizers
from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...contract.decoding import UNDECODABLE
from ...contract.errors import CheckpointInvalid, InvalidInput

REPLACEMENT = "�"
MAX_HELD_TOKENS = 4
"""Most tokens without a text: a character has at most four bytes, and a token at least one."""
TAIL_TOKENS = 3
"""Tokens that have all bytes of an incomplete character."""


class Vocabulary(Protocol):
    """Encodes text to tokens and decodes tokens: `Tokenizer`, or `TableTokenizer` where the checkpoint has a table."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str: ...

    def piece(self, token: int) -> str:
        """Entry of a token in the vocabulary, in the tokenizer's own alphabet; empty without one."""
        ...


class Tokenizer:
    """Tokenizer over a tokenizer.json."""

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointInvalid(f"tokenizer.json is not readable: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes text. `add_special_tokens` adds those of the post-processor; a rendered chat contains its own."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special)

    def piece(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


class Detokenizer:
    """Streaming detokenizer: returns text of new tokens, without partial characters.

    Some tokenizers put a space before the first token of a text or drop it, so new tokens are decoded
    after a few shown ones and the common beginning is taken away. A token may end one character and begin the next:
    where several do so in a row, the text before the last character is returned and that one alone is held.
    """

    def __init__(self, tokenizer: Vocabulary, shown: Mapping[int, str] = MappingProxyType({})) -> None:
        """`shown`: special tokens that belong to the text."""
        self._tokenizer = tokenizer
        self._special = shown
        self._tokens: list[int] = []
        """Tokens that are decoded together; the last `_held` of them have text that was not returned."""
        self._held = 0
        self._given = 0
        """Characters of their text that were returned."""

    def feed(self, token: int) -> str:
        if token in self._special:
            text = self.flush() + self._special[token]
            self._tokens, self._held, self._given = [], 0, 0
            return text
        self._tokens.append(token)
        self._held += 1
        text = self._tokenizer.decode(self._tokens)
        if self._held == 1 and len(text) == self._given and self._is_hidden(token):
            self._tokens.pop()  # as the context of the next one it would be the beginning of a text
            self._held = 0
            return ""
        if not text.endswith(REPLACEMENT):
            return self._give(text, self._held)
        if self._held < MAX_HELD_TOKENS:
            return ""
        if not self._tokenizer.decode(self._tokens[-TAIL_TOKENS:]).endswith(REPLACEMENT):  # no character any more
            return self._give(text, TAIL_TOKENS)
        fresh = self._give(text[:-1], TAIL_TOKENS)
        self._held, self._given = 1, self._given - 1
        return fresh

    def _is_hidden(self, token: int) -> bool:
        """Checks whether a token is a special one, without a text."""
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special=False))

    def flush(self) -> str:
        """Returns the held-back bytes of an incomplete character."""
        return self._give(self._tokenizer.decode(self._tokens), self._held) if self._held else ""

    def _give(self, text: str, context: int) -> str:
        """Returns what is new in the text of the tokens, and keeps that many of them for the next one."""
        fresh = text[self._given :]
        self._tokens = self._tokens[-context:]
        self._held, self._given = 0, len(self._tokenizer.decode(self._tokens))
        return fresh


_FAULTS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Errors that a template's own expressions raise, when it is compiled, which computes constants, or rendered."""


class _GenerationTag(Extension):
    """`{% generation %}` around what a model answers, with which transformers masks training data: it is shown as it
    is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 has it so

    def parse(self, parser: Parser) -> nodes.Node:
        begin = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=begin)


class ChatTemplate:
    """Chat template of a model: renders messages. Errors: InvalidInput if the template rejects them."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str | None = None) -> None:
        """`tool_source`: template of chats with tools, if the model has one of its own for them."""
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        self._environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._environment.filters["tojson"] = _tojson
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
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
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
