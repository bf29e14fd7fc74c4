"""Messages of a chat: their parts, their fields, and what a list of them has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...openai_api.invalid_parameter import InvalidParameter
from ...openai_api.request_fields import REFUSED_PARTS
from .tools.requests import ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct, frozen=True):
    """Part of a chat message; only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """Text of a part of type "refusal", which assistant messages may have."""

    def plain(self, role: str) -> str:
        """The part's text in a message of this role. Errors: InvalidParameter for another kind."""
        refuses = self.type == "refusal" and role == "assistant"
        if self.type != "text" and not refuses:
            reason = REFUSED_PARTS.get(self.type, "parts are of type 'text'")
            raise InvalidParameter(f"messages: a part of type {self.type!r} is not supported: {reason}", "messages")
        text = self.refusal if refuses else self.text
        if text is None:
            raise InvalidParameter(f"messages: a part of type {self.type!r} lacks its text", "messages")
        return text


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Calls of an assistant's message."""
    tool_call_id: str | None = None
    """Call that a message of role "tool" answers."""
    refusal: str | None = None
    """Text of an assistant's message without content."""
    annotations: list[Any] | None = None
    """Empty field of assistant messages, which clients send back, as are the next two."""
    audio: None = None
    function_call: None = None

    def text(self) -> str:
        """The content; text parts are concatenated. Errors: InvalidParameter for parts of other kinds."""
        if isinstance(self.content, list):
            return "".join(part.plain(self.role) for part in self.content)
        return self.content or self.refusal or ""

    def plain(self) -> dict[str, Any]:
        """The message for a chat template. Errors: InvalidParameter."""
        # Templates know the older name of a developer's messages.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text()}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        return message


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Checks the messages of a chat. Errors: InvalidParameter with the place of the first that is wrong."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        if message.role not in ROLES:
            raise _invalid(place, "role", f"{message.role!r} is none of {', '.join(ROLES)}")
        if message.content is None and message.role != "assistant":
            raise _invalid(place, "content", f"a message of role {message.role!r} needs one")
        if message.role == "tool" and (message.tool_call_id or "") not in called:
            reason = f"no assistant message before has a tool call with the id {message.tool_call_id!r}"
            raise _invalid(place, "tool_call_id", reason)
        message.plain()
        called |= {call.id for call in message.tool_calls or ()}


def _invalid(place: int, field: str, reason: str) -> InvalidParameter:
    name = f"messages[{place}].{field}"
    return InvalidParameter(f"{name}: {reason}", name)
