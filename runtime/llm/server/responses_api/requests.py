"""Request body of `/v1/responses`, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from ....openai_api.invalid_parameter import InvalidParameter, check_range
from ....openai_api.request_fields import REFUSED_PARTS
from ..chat_messages import ChatMessage, ContentPart
from ..output_format import JsonSchemaFormat, ResponseFormat
from ..requests import MAX_LOGPROBS, ChatCall
from ..tools.requests import FunctionTool, NamedFunction, NamedToolChoice, Tool, ToolCall, ToolCallFunction, ToolChoice

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
"""What clients that keep no state ask for unasked: answers have no items of reasoning."""
TEXT_PARTS = ("input_text", "output_text", "text")
KINDS = {"input_image": "image_url", "input_file": "file", "input_audio": "input_audio"}
"""Kinds of refused parts, with their names in chats."""

OWN_NAMES = {"messages": "input", "response_format": "text"}
"""Fields of this route by the names of those of a chat."""


class InputPart(msgspec.Struct, frozen=True):
    """Part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def chat(self) -> ContentPart:
        """The part of a chat message; its text is checked there. Errors: InvalidParameter for a refused kind."""
        if self.type in KINDS:
            reason = REFUSED_PARTS[KINDS[self.type]]
            raise InvalidParameter(f"input: a part of type {self.type!r} is not supported: {reason}", "input")
        return ContentPart("text" if self.type in TEXT_PARTS else self.type, self.text, self.refusal)


Content = str | list[InputPart]


class InputItem(msgspec.Struct, frozen=True):
    """Item of the input; items of earlier answers come back with more fields than are read."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """`tools[]`: a function without an object of its own."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: str


@contextmanager
def own_names() -> Iterator[None]:
    """Names the fields of this route in errors about the chat that a call asks for."""
    try:
        yield
    except InvalidParameter as error:
        # Places in the chat are not those in the input.
        name = OWN_NAMES.get((error.param or "").partition("[")[0])
        if name is None:
            raise
        raise InvalidParameter(error.message.replace(f"{error.param}:", f"{name}:", 1), name) from error


class ResponsesCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/responses`."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None

    def check(self) -> None:
        """Errors: InvalidParameter for a value out of range or an unsupported feature."""
        for name in self.include or ():
            if name not in (LOGPROBS, ENCRYPTED):
                raise InvalidParameter(f"include: {name!r} is not there, only {LOGPROBS!r}", "include")
        if self.truncation == "auto":
            raise InvalidParameter(
                "truncation: 'auto' is not supported, no items are dropped: leave truncation out, and send fewer items "
                "where the input is too long",
                "truncation",
            )
        check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidParameter(
                f"max_output_tokens must be at least 1, is {self.max_output_tokens}", "max_output_tokens"
            )
        if not self.input:
            raise InvalidParameter("input must not be empty", "input")
        with own_names():
            self.chat().check()

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def chat(self) -> ChatCall:
        """The chat that the call asks for. Errors: InvalidParameter."""
        return ChatCall(
            model=self.model,
            messages=list(self._messages()),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=self._format(),
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _messages(self) -> Iterable[ChatMessage]:
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = merged([_message(item) for item in items if item.type != "reasoning"])
        if self.instructions and messages and messages[0].role == "system":
            return [ChatMessage("system", f"{self.instructions}\n\n{messages[0].text()}"), *messages[1:]]
        return [ChatMessage("system", self.instructions), *messages] if self.instructions else messages

    def _format(self) -> ResponseFormat | None:
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        if given.type != "json_schema":
            return ResponseFormat(given.type)
        if given.schema is None:
            raise InvalidParameter("text.format: type 'json_schema' needs a schema", "text")
        return ResponseFormat(
            "json_schema", JsonSchemaFormat(given.name or "answer", given.schema, strict=given.strict)
        )

    def _tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        return NamedToolChoice("function", NamedFunction(choice.name)) if isinstance(choice, NamedChoice) else choice


def merged(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Messages of which an assistant's text and the calls after it are one, as chat templates expect them."""
    result: list[ChatMessage] = []
    for message in messages:
        last = result[-1] if result else None
        if message.tool_calls and last is not None and last.role == "assistant":
            calls = [*(last.tool_calls or []), *message.tool_calls]
            result[-1] = ChatMessage("assistant", last.content, tool_calls=calls)
        else:
            result.append(message)
    return result


def _message(item: InputItem) -> ChatMessage:
    match item:
        case InputItem(type="message", role=str(role), content=content) if content is not None:
            return ChatMessage("system" if role == "developer" else role, _content(content))
        case InputItem(type="function_call", call_id=str(id), name=str(name), arguments=str(arguments)):
            return ChatMessage("assistant", tool_calls=[ToolCall(ToolCallFunction(name, arguments), id)])
        case InputItem(type="function_call_output", call_id=str(id), output=output) if output is not None:
            return ChatMessage("tool", _content(output), tool_call_id=id)
        case InputItem(type="message" | "function_call" | "function_call_output"):
            raise InvalidParameter(f"input: an item of type {item.type!r} lacks a field", "input")
    raise InvalidParameter(f"input: items of type {item.type!r} are not supported", "input")


def _content(content: Content) -> str | list[ContentPart]:
    return content if isinstance(content, str) else [part.chat() for part in content]


def _tool(tool: ResponsesTool) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise InvalidParameter(f"tools: type {tool.type!r} is not supported, only functions with their name", "tools")
    return Tool("function", FunctionTool(tool.name, tool.description, tool.parameters, tool.strict))
