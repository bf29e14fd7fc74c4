"""Writer of `/v1/responses`: one answer as items, whole or event by event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....openai_api.responses import DONE, Json, TokenUsage
from ...engine.generation import FinishReason, TokenDelta
from ...engine.logprobs import TokenLogprob
from ...text.token_texts import TokenTexts
from ..answer_writers import AnswerWriter, Choice
from ..tools.parser import CallArguments, CallStarted, ContentText, Part, ToolParser
from ..tools.reader import ToolReader
from .requests import ResponsesCall


@dataclass(slots=True)
class _Item:
    """Output item that is being written: a message, or a call if it has a name."""

    id: str
    name: str = ""
    call_id: str = ""
    text: str = ""
    """Text of the message, or arguments of the call."""
    status: str = "in_progress"
    logprobs: list[Json] = field(default_factory=list)
    """Log probabilities of the message's tokens, if they were asked for."""

    def json(self) -> Json:
        if self.name:
            return {"type": "function_call", "id": self.id, "call_id": self.call_id, "name": self.name} | {
                "arguments": self.text,
                "status": self.status,
            }
        content = [] if self.status == "in_progress" else [self.part()]
        return {"type": "message", "id": self.id, "role": "assistant", "status": self.status, "content": content}

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponsesWriter(AnswerWriter):
    """Writer of the one answer of a call."""

    prefix = "resp_"

    def __init__(
        self, model: str, call: ResponsesCall, *, texts: TokenTexts | None = None, tools: ToolReader | None = None
    ) -> None:
        super().__init__(model, texts=texts)
        self.repeats_logprobs = texts is not None
        self._call = call
        self._tools = tools
        self._parser: ToolParser | None = None if tools is None else tools.parser()
        self._items: list[_Item] = []
        self._pending: list[Json] = []
        """Log probabilities of tokens whose text is not known yet to be of a message or of a call."""
        self._finish: FinishReason | None = None
        self._number = 0

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        [choice] = choices
        for delta in choice.deltas:
            self.feed(0, delta)
        return msgspec.json.encode(self._response(usage))

    def feed(self, index: int, delta: TokenDelta) -> bytes:
        events = b""
        if not self._number:
            events += self._event("response.created", response=self._response(None))
            events += self._event("response.in_progress", response=self._response(None))
        self._pending += [self._logprob(one) for one in delta.logprobs]
        for part in self._parts(delta):
            events += self._feed_part(part)
        if delta.finish:
            self._finish = delta.finish
            if not self._items:
                events += self._open(_Item(self._item_id("msg")))
            if self._pending and not self._items[-1].name:
                events += self._feed_part(ContentText(""))  # tokens of a stop string, whose text is not shown
            events += self._close()
        return events

    def closing(self, usage: TokenUsage) -> bytes:
        name = "response.incomplete" if self._finish == "length" else "response.completed"
        # Clients of OpenAI stop reading here: the gateway's bill comes behind.
        return self._event(name, response=self._response(usage)) + DONE

    def _parts(self, delta: TokenDelta) -> list[Part]:
        if self._parser is None:
            return [ContentText(delta.text)] if delta.text else []
        return self._parser.feed(delta.text) + (self._parser.flush() if delta.finish else [])

    def _feed_part(self, part: Part) -> bytes:
        match part:
            case ContentText(text=text):
                events = b"" if self._is_open and not self._items[-1].name else self._open(_Item(self._item_id("msg")))
                item = self._items[-1]
                item.text += text
                logprobs, self._pending = self._pending, []
                item.logprobs += logprobs
                place = self._place(item) | {"content_index": 0}
                return events + self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
            case CallStarted(index=number, name=name):
                assert self._tools is not None
                self._pending = []
                call_id = self._tools.call_id(f"{self.id}/0/{number}")
                return self._open(_Item(self._item_id("fc"), name, call_id))
            case CallArguments(text=text):
                self._pending = []
                item = self._items[-1]
                item.text += text
                return self._event("response.function_call_arguments.delta", **self._place(item), delta=text)

    @property
    def _is_open(self) -> bool:
        return bool(self._items) and self._items[-1].status == "in_progress"

    def _open(self, item: _Item) -> bytes:
        """Begins an item, behind the end of the one before."""
        events = self._close() if self._is_open else b""
        self._items.append(item)
        place = self._place(item)
        events += self._event("response.output_item.added", output_index=place["output_index"], item=item.json())
        if not item.name:
            events += self._event("response.content_part.added", **place, content_index=0, part=item.part())
        return events

    def _close(self) -> bytes:
        """Ends the item that is open; empty without one."""
        if not self._is_open:
            return b""
        item = self._items[-1]
        item.status = "incomplete" if self._finish == "length" else "completed"
        place = self._place(item)
        if item.name:
            events = self._event("response.function_call_arguments.done", **place, name=item.name, arguments=item.text)
        else:
            at = place | {"content_index": 0}
            events = self._event("response.output_text.done", **at, text=item.text, logprobs=item.logprobs)
            events += self._event("response.content_part.done", **at, part=item.part())
        return events + self._event("response.output_item.done", output_index=place["output_index"], item=item.json())

    def _place(self, item: _Item) -> Json:
        return {"item_id": item.id, "output_index": len(self._items) - 1}

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self.id.removeprefix(self.prefix)}{len(self._items)}"

    def _event(self, type: str, **fields: Any) -> bytes:
        body = {"type": type, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + type.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"

    def _response(self, usage: TokenUsage | None) -> Json:
        call = self._call
        cut = self._finish == "length"
        text_format: Json = {"type": "text"}
        if call.text is not None and call.text.format is not None:
            text_format = msgspec.to_builtins(call.text.format)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": "in_progress" if usage is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "model": self._model,
            "output": [] if usage is None else [item.json() for item in self._items],
            "parallel_tool_calls": call.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": call.temperature,
            "text": {"format": text_format},
            "tool_choice": msgspec.to_builtins(call.tool_choice or "auto"),
            "tools": [msgspec.to_builtins(tool) for tool in call.tools or []],
            "top_p": call.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "metadata": call.metadata or {},
        }

    def _logprob(self, one: TokenLogprob) -> Json:
        return self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}

    def _entry(self, token: int, logprob: float) -> Json:
        assert self._texts is not None
        raw = self._texts.raw(token)
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(raw or b"")}


def _usage(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
