"""Prompts: tokens of texts and chats, and what follows from a chat's tools and format for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...contract.errors import InvalidInput
from ...openai_api.invalid_parameter import InvalidParameter
from ..engine.constraint import Constraint
from ..engine.context_limit import InvalidPrompt
from ..model.loaded_model import LoadedModel
from .chat_messages import ChatMessage
from .output_format import json_grammar
from .tools.formats import ToolFormat, format_of, mark_tokens, shown_tokens
from .tools.grammar import calls_grammar, followed_schemas, free_grammar
from .tools.prompt import render_chat
from .tools.reader import ToolReader
from .tools.requests import ToolUse

LONG_TEXT = 16_384
"""Length in characters above which a text is tokenised in a thread, since it takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Prompt of a chat, and what its answer has to follow."""

    tokens: list[int]
    constraint: Constraint | None = None
    tools: ToolReader | None = None
    shown_tokens: Mapping[int, str]


class Prompts:
    """Makes the prompts of one model."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    async def text(self, prompt: str | list[int]) -> list[int]:
        """Tokens of a text or of given tokens. Errors: InvalidPrompt for a token that the model does not have."""
        if isinstance(prompt, str):
            return await self._tokens(prompt, add_special_tokens=True)
        vocab_size = self._model.vocab_size
        if any(not 0 <= token < vocab_size for token in prompt):
            raise InvalidPrompt(f"prompt: a token is not of 0 to {vocab_size - 1}")
        return prompt

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        use: ToolUse | None = None,
        schema: dict[str, Any] | bool | None = None,
    ) -> ChatPrompt:
        """Prompt of a chat with these tools, whose answer is JSON of the schema. Errors: InvalidInput with the reason.

        The answer may be calls instead of JSON, unless calls are forced. `schema` has the compiler's options.
        """
        template = self._model.chat_template
        if template is None:
            raise InvalidPrompt("this model has no chat template", hint="use /v1/completions")
        form = self._tool_format
        if use is not None and form is None:
            raise InvalidParameter("tools: the format of the tools in this model's chat template is not known", "tools")
        text = render_chat(template, [message.plain() for message in messages], use)
        tokens = await self._tokens(text, add_special_tokens=False)
        if use is None or form is None:
            constraint = None if schema is None else await asyncio.to_thread(self._json_constraint, schema)
            return ChatPrompt(tokens=tokens, constraint=constraint, shown_tokens={})
        grammar = None
        if use.forced or schema is not None:
            grammar = calls_grammar(use, form, self._marks, None if use.forced else schema)
        elif use.constrained:
            grammar = free_grammar(use, form, self._marks)
        constraint = None if grammar is None else await asyncio.to_thread(self._calls_constraint, grammar, use, schema)
        reader = ToolReader(form, use.parallel, {tool.name: tool.schema for tool in use.tools})
        return ChatPrompt(tokens=tokens, constraint=constraint, tools=reader, shown_tokens=self._shown_tokens)

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        template = self._model.chat_template
        return None if template is None else format_of(template)

    @cached_property
    def _marks(self) -> dict[str, int]:
        return {} if self._tool_format is None else mark_tokens(self._tool_format, self._model.tokenizer)

    @cached_property
    def _shown_tokens(self) -> dict[int, str]:
        return shown_tokens(self._marks, self._model.tokenizer)

    async def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = self._model.tokenizer.encode
        if len(text) < LONG_TEXT:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    def _json_constraint(self, schema: dict[str, Any] | bool) -> Constraint:
        """The constraint of an answer in JSON. Errors: InvalidParameter with the reason."""
        try:
            return self._model.constraints.compile(json_grammar(schema))
        except InvalidInput as error:
            raise InvalidParameter(f"response_format: {error.message}", "response_format") from error

    def _calls_constraint(self, grammar: str, use: ToolUse, schema: dict[str, Any] | bool | None) -> Constraint:
        """The constraint of a grammar of calls. Errors: InvalidParameter with the function and the reason."""
        try:
            return self._model.constraints.compile(grammar)
        except InvalidInput as error:
            whole = error
        if not use.forced and schema is not None:
            self._json_constraint(schema)
        for name, followed in followed_schemas(use):
            try:
                self._model.constraints.compile(json_grammar(followed))
            except InvalidInput as error:
                raise InvalidParameter(f"tools: the schema of {name!r}: {error.message}", "tools") from error
        raise InvalidParameter(f"tools: {whole.message}", "tools") from whole
