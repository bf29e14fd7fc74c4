"""Responses of the OpenAI API: chat and text completions, whole and in chunks, models, errors."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

import msgspec

from ...contract.errors import FleetError, Refused
from ..engine.generation import FinishReason

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


class TokenUsage(msgspec.Struct):
    """Token counts of one call over all choices; a prompt counts once for each computation."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def json(self) -> Json:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class OpenAIResponse:
    """Writes the response of one call: whole, or chunk by chunk."""

    def __init__(self, kind: Literal["chat", "text"], model: str, id: str = "", created_s: int = 0) -> None:
        """`id` and `created_s` are set for a resumed stream."""
        self._chat = kind == "chat"
        self.id = id or ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12)
        self.created_s = created_s or int(time.time())
        self._head: Json = {"id": self.id, "created": self.created_s, "model": model}

    def whole(self, choices: list[tuple[str, FinishReason | None]], usage: TokenUsage) -> bytes:
        kind = "chat.completion" if self._chat else "text_completion"
        listed = [self._choice(index, text, finish) for index, (text, finish) in enumerate(choices)]
        return msgspec.json.encode({**self._head, "object": kind, "choices": listed, "usage": usage.json()})

    def _choice(self, index: int, text: str, finish: FinishReason | None) -> Json:
        body: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        )
        return {"index": index, **body, "logprobs": None, "finish_reason": finish}

    def opening(self, index: int, *, with_usage: bool) -> bytes:
        """First chunk of a choice: the role in a chat, nothing in a text completion."""
        if not self._chat:
            return b""
        return self._chunk([self._delta(index, {"role": "assistant", "content": ""}, None)], with_usage)

    def chunk(self, index: int, text: str, finish: FinishReason | None, *, with_usage: bool) -> bytes:
        if self._chat:
            return self._chunk([self._delta(index, {"content": text} if text else {}, finish)], with_usage)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        return self._chunk([choice], with_usage)

    def closing(self, usage: TokenUsage) -> bytes:
        """Last chunk with `stream_options.include_usage`: no choice, the token counts."""
        return event({**self._head, "object": self._chunk_kind, "choices": [], "usage": usage.json()})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, choices: list[Json], with_usage: bool) -> bytes:
        body = {**self._head, "object": self._chunk_kind, "choices": choices}
        if with_usage:
            body["usage"] = None  # the API promises the field on every chunk then
        return event(body)

    @staticmethod
    def _delta(index: int, delta: Json, finish: FinishReason | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def event(body: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def models(name: str, created_s: int) -> Json:
    """Body of `/v1/models`."""
    return {"object": "list", "data": [model(name, created_s)]}


def model(name: str, created_s: int) -> Json:
    """Body of `/v1/models/{name}`."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "fleetstart"}


def error_body(error: FleetError) -> Json:
    """Error body with OpenAI's four fields, and a hint if there is one."""
    fields: Json = {
        "message": error.message,
        "type": "invalid_request_error" if isinstance(error, Refused) else "server_error",
        "param": getattr(error, "param", None),
        "code": error.code,
    }
    return {"error": fields | ({"hint": error.hint} if error.hint else {})}
