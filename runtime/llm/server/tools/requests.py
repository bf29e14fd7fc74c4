"""Tool fields of requests: `tools`, `tool_choice`, and the calls in messages that clients send back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ....contract.decoding import UNDECODABLE
from ....openai_api.invalid_parameter import InvalidParameter

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Declaration of a function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments: an empty object without one."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}

    def plain(self) -> dict[str, Any]:
        """The declaration for a chat template."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name} | described | {"parameters": self.schema}}


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `tools[]`."""

    type: str
    function: FunctionTool | None = None


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ToolCallFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """Call in an assistant's message, as a client sends it back."""

    function: ToolCallFunction
    id: str = ""
    type: Literal["function"] = "function"

    def plain(self) -> dict[str, Any]:
        """The call for a chat template. Errors: InvalidParameter if the arguments are not JSON."""
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}")
        except UNDECODABLE as error:
            reason = f"messages: the arguments of tool call {self.id!r} are not JSON: {error}"
            raise InvalidParameter(reason, "messages") from error
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ToolUse(msgspec.Struct, frozen=True):
    """Tools of a call, and how it may use them."""

    tools: Sequence[FunctionTool]
    forced: bool = False
    """True if the answer consists of calls."""
    parallel: bool = True
    """True if several calls may be made."""

    @property
    def constrained(self) -> bool:
        """Checks whether calls follow a grammar: forced ones, and those where a function is strict."""
        return self.forced or any(tool.strict for tool in self.tools)


def read_tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """The tools of a call; None if it has none, or may not use them. Errors: InvalidParameter."""
    functions = [_function(tool) for tool in tools or ()]
    names = [function.name for function in functions]
    if len(names) > MAX_TOOLS or len(set(names)) < len(names):
        raise InvalidParameter(f"tools: at most {MAX_TOOLS}, with different names", "tools")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise InvalidParameter(f"tool_choice: {name!r} is not among the tools {names}", "tool_choice")
        return ToolUse(functions, forced=True, parallel=False)
    if choice == "required" and not functions:
        raise InvalidParameter("tool_choice: 'required' needs tools", "tool_choice")
    if not functions or choice == "none":
        return None
    return ToolUse(functions, forced=choice == "required", parallel=parallel is not False)


def _function(tool: Tool) -> FunctionTool:
    if tool.type != "function" or tool.function is None:
        raise InvalidParameter(f"tools: type {tool.type!r} is not supported, only functions with their name", "tools")
    if not _NAME.fullmatch(tool.function.name):
        raise InvalidParameter(
            f"tools: the name {tool.function.name!r} is not of 1 to 64 letters, digits, '_', '.' and '-'", "tools"
        )
    return tool.function
