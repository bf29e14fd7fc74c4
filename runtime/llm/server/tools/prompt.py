"""Chat prompt: messages and tools as a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...text.chat_template import ChatTemplate
from .formats import PROMPTED, ToolFormat
from .requests import ToolUse

Message = dict[str, Any]

DECLARATION = """You can call functions. These are their names, purposes and parameters:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between these tags, once for each call:
{begin}
{{"name": "...", "arguments": {{...}}}}
{end}
The result of each call comes back between <tool_response> and </tool_response>."""


def render_chat(template: ChatTemplate, messages: Sequence[Message], use: ToolUse | None) -> str:
    """The prompt of a chat. Errors: as of `ChatTemplate.render`."""
    declared = None if use is None else [tool.plain() for tool in use.tools]
    if template.takes_tools:
        return template.render(list(messages), tools=declared)
    plain = [_without_tools(message) for message in messages]
    return template.render(plain if declared is None else _declared(plain, declared, PROMPTED))


def _declared(messages: list[Message], tools: list[Message], form: ToolFormat) -> list[Message]:
    """Messages whose first is a system message that declares the tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = DECLARATION.format(tools=listed, begin=form.begin, end=form.end)
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_tools(message: Message) -> Message:
    """A message for a template that knows neither calls nor their results."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls") or []
    texts = [message["content"]] if message["content"] else []
    texts += [f"{PROMPTED.begin}\n{json.dumps(call['function'], ensure_ascii=False)}\n{PROMPTED.end}" for call in calls]
    return {"role": message["role"], "content": "\n".join(texts)}
