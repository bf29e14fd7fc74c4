"""Answer writers: the responses of chat and text completions, whole or event by event.

A writer is a function of its call and of the deltas that it is fed: for a resumed stream it is fed the earlier ones
again, and continues with the same events.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec

from ...openai_api.responses import DONE, Json, TokenUsage, event
from ..engine.generation import FinishReason, TokenDelta
from ..engine.logprobs import TokenLogprob
from ..text.token_texts import TokenTexts
from .tools.parser import CallArguments, CallStarted, ContentText, Part, ToolParser
from .tools.reader import ToolReader


@dataclass(slots=True)
class Choice:
    """What one choice has generated."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    deltas: list[TokenDelta] = field(default_factory=list)
    """What it consists of."""

    def add(self, delta: TokenDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        self.deltas.append(delta)


class AnswerWriter(ABC):
    """Writer of the response to one call: `whole`, or `feed` for each delta and `closing`."""

    prefix: str
    repeats_logprobs = False
    """True if later events repeat the log probabilities of earlier ones, so that a resume needs them."""

    def __init__(self, model: str, *, texts: TokenTexts | None = None, with_usage: bool = False) -> None:
        """`texts` is set if the call wants log probabilities; `with_usage`: the stream ends with token counts."""
        self._model = model
        self._texts = texts
        self._with_usage = with_usage
        self.id = self.prefix + secrets.token_hex(12)
        self.created_s = int(time.time())

    def resume(self, id: str, created_s: int) -> None:
        """Takes the id and time of the stream that is resumed."""
        self.id, self.created_s = id, created_s

    @abstractmethod
    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        """The whole response."""

    @abstractmethod
    def feed(self, index: int, delta: TokenDelta) -> bytes:
        """Events of a choice's next delta; empty if nothing can be shown yet."""

    @abstractmethod
    def closing(self, usage: TokenUsage) -> bytes:
        """Events after the last delta."""

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "created": self.created_s, "model": self._model, "object": kind}


class _CompletionsWriter(AnswerWriter):
    """What chunks of chat and text completions share."""

    chunk_kind: str

    def _chunk(self, choice: Json) -> bytes:
        body = self._head(self.chunk_kind) | {"choices": [choice]}
        if self._with_usage:
            body["usage"] = None  # the API promises the field on every chunk then
        return event(body)

    def closing(self, usage: TokenUsage) -> bytes:
        if not self._with_usage:
            return DONE
        return event(self._head(self.chunk_kind) | {"choices": [], "usage": usage.json()}) + DONE


class ChatWriter(_CompletionsWriter):
    """Writer of `/v1/chat/completions`."""

    prefix = "chatcmpl-"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        *,
        texts: TokenTexts | None = None,
        with_usage: bool = False,
        tools: ToolReader | None = None,
    ) -> None:
        """`tools` is set if the answer may contain calls."""
        super().__init__(model, texts=texts, with_usage=with_usage)
        self._opened: set[int] = set()
        self._tools = tools
        self._parsers: dict[int, ToolParser] = {}

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        listed = []
        for index, choice in enumerate(choices):
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if self._tools is not None and (parsed := self._tools.parse(choice.text)).calls:
                message["content"] = parsed.content or None
                message["tool_calls"] = [
                    self._call(index, number, call.name, call.arguments) for number, call in enumerate(parsed.calls)
                ]
            listed.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": _finish(choice.finish, called="tool_calls" in message),
                }
            )
        return msgspec.json.encode(self._head("chat.completion") | {"choices": listed, "usage": usage.json()})

    def feed(self, index: int, delta: TokenDelta) -> bytes:
        events = b""
        if index not in self._opened:
            self._opened.add(index)
            events = self._delta(index, {"role": "assistant", "content": ""})
        if self._tools is not None:
            return events + self._feed_tools(index, delta, self._tools)
        # A token that is part of a character, or may become a stop string, has no text yet.
        if delta.text or delta.finish or delta.logprobs:
            content = {"content": delta.text} if delta.text else {}
            events += self._delta(index, content, delta.logprobs, delta.finish)
        return events

    def _feed_tools(self, index: int, delta: TokenDelta, tools: ToolReader) -> bytes:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = tools.parser()
        parts = parser.feed(delta.text) + (parser.flush() if delta.finish else [])
        bodies = [self._part(index, part) for part in parts]
        if delta.finish or (delta.logprobs and not bodies):
            bodies.append({})
        events = b""
        for place, body in enumerate(bodies):
            finish = _finish(delta.finish, called=parser.called) if place == len(bodies) - 1 else None
            events += self._delta(index, body, () if place else delta.logprobs, finish)
        return events

    def _part(self, index: int, part: Part) -> Json:
        match part:
            case ContentText(text=text):
                return {"content": text}
            case CallStarted(index=number, name=name):
                return {"tool_calls": [{"index": number} | self._call(index, number, name, "")]}
            case CallArguments(index=number, text=text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _call(self, index: int, number: int, name: str, arguments: str) -> Json:
        assert self._tools is not None
        id = self._tools.call_id(f"{self.id}/{index}/{number}")
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _delta(
        self, index: int, delta: Json, logprobs: tuple[TokenLogprob, ...] = (), finish: str | None = None
    ) -> bytes:
        shown = self._logprobs(logprobs) if logprobs else None
        return self._chunk({"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish})

    def _logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> Json | None:
        if self._texts is None:
            return None
        listed = [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in logprobs
        ]
        return {"content": listed, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        assert self._texts is not None
        raw = self._texts.raw(token)
        shown = None if raw is None else list(raw)
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": shown}


def _finish(reason: FinishReason | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


class TextWriter(_CompletionsWriter):
    """Writer of `/v1/completions`."""

    prefix = "cmpl-"
    chunk_kind = "text_completion"

    def __init__(self, model: str, *, texts: TokenTexts | None = None, with_usage: bool = False) -> None:
        super().__init__(model, texts=texts, with_usage=with_usage)
        self._offsets: dict[int, int] = {}

    def whole(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        listed = [
            self._choice(index, choice.text, self._logprobs(choice.logprobs, 0), choice.finish)
            for index, choice in enumerate(choices)
        ]
        return msgspec.json.encode(self._head("text_completion") | {"choices": listed, "usage": usage.json()})

    def feed(self, index: int, delta: TokenDelta) -> bytes:
        offset = self._offsets.get(index, 0)
        if self._texts is not None:
            self._offsets[index] = offset + sum(len(self._texts.text(token)) for token in delta.tokens)
        if not (delta.text or delta.finish or delta.logprobs):
            return b""
        shown = self._logprobs(delta.logprobs, offset) if delta.logprobs else None
        return self._chunk(self._choice(index, delta.text, shown, delta.finish))

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None, finish: FinishReason | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...], offset: int) -> Json | None:
        """The older form of log probabilities. `offset`: length of the texts of the tokens before."""
        if self._texts is None:
            return None
        texts = [self._texts.text(one.token) for one in logprobs]
        offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
        top = [{self._texts.text(token): logprob for token, logprob in one.top} for one in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }
