"""Parts of the OpenAI API's responses that several routes share: usage, models, errors, events."""

from __future__ import annotations

from typing import Any

import msgspec

from ..contract.errors import FleetError, Refused
from ..contract.worker_headers import retry_headers
from ..worker_io.asgi import JSON, Send, respond

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


class TokenUsage(msgspec.Struct):
    """Token counts of one call over all choices; a prompt counts once for each computation."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompts whose keys and values were there before the call."""

    def count(self, completion_tokens: int, cached_tokens: int) -> None:
        """Adds what a step has given to a choice. A prompt's cached tokens are counted with its first choice."""
        self.completion_tokens += completion_tokens
        self.cached_tokens += cached_tokens

    def json(self) -> Json:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def event(body: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def models(name: str, created_s: int) -> Json:
    """Body of `/v1/models`."""
    return {"object": "list", "data": [model(name, created_s)]}


def model(name: str, created_s: int) -> Json:
    """Body of `/v1/models/{name}`."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "fleetstart"}


def error_body(error: FleetError, param: str | None = None) -> Json:
    """Error body with OpenAI's four fields, and a hint if there is one. `param`: the field, if the error has none."""
    fields: Json = {
        "message": error.message,
        "type": "invalid_request_error" if isinstance(error, Refused) else "server_error",
        "param": getattr(error, "param", None) or param,
        "code": error.code,
    }
    return {"error": fields | ({"hint": error.hint} if error.hint else {})}


async def respond_error(send: Send, error: FleetError, param: str | None = None) -> None:
    """Sends a whole error response; `param` as of `error_body`."""
    await respond(send, error.status, msgspec.json.encode(error_body(error, param)), JSON, retry_headers(error))
