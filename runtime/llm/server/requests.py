"""Request bodies of the OpenAI-compatible routes and of `POST /`, validated by field.

Every field of the OpenAI API is either honoured, ignored because it changes no token (`user`), accepted at the value
that means "off", or rejected with its name. None is dropped silently.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from ...contract.errors import InvalidInput, Refused
from ..engine.sampler import SamplingParams

MAX_CHOICES = 16
MAX_STOPS = 16
SEED_BITS = 64
_PATH = re.compile(r" - at `\$\.?([A-Za-z_]\w*)?")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"required field `([^`]*)`")


class InvalidParameter(InvalidInput):
    """Error of an invalid or unsupported parameter, with its name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(Refused):
    """Error of a request for another model."""

    code = "model_not_found"
    status = 404
    param = "model"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text part of a chat message."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    """Empty field of assistant messages, which clients send back."""

    def plain(self) -> dict[str, str]:
        """The message for a chat template; text parts are concatenated."""
        if isinstance(self.content, list):
            return {"role": self.role, "content": "".join(part.text for part in self.content)}
        return {"role": self.role, "content": self.content or ""}


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling fields of every route."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """An extension of vLLM and others to OpenAI's API."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    """For benchmarks: generates until max_tokens."""
    user: Any = None
    metadata: Any = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters with the model's defaults. Errors: InvalidParameter for a field out of range."""
        _in_range("temperature", self.temperature, 0.0, 2.0)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidParameter(f"top_p must be above 0 and at most 1, is {self.top_p}", "top_p")
        _in_range("top_k", self.top_k, -1, 1 << 30)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None and self.seed.bit_length() > SEED_BITS:
            raise InvalidParameter(f"seed has more than {SEED_BITS} bits", "seed")
        return SamplingParams(
            temperature=_given(self.temperature, defaults.temperature),
            top_k=max(_given(self.top_k, defaults.top_k), 0),  # -1 is vLLM's word for all
            top_p=_given(self.top_p, defaults.top_p),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            seed=self.seed,
        )

    def stops(self) -> list[str]:
        """Stop strings. Errors: InvalidParameter."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise InvalidParameter(f"stop takes up to {MAX_STOPS} strings, none of them empty", "stop")
        return stops

    def limit(self) -> int | None:
        """Most new tokens; None for as many as the context holds. Errors: InvalidParameter."""
        return _limit("max_tokens", self.max_tokens)


class StreamableCall(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the routes that can stream."""

    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Any = None
    logit_bias: Any = None
    logprobs: Any = None

    def check(self) -> None:
        """Checks the fields. Errors: InvalidParameter for a value out of range or an unsupported feature."""
        _in_range("n", self.n, 1, MAX_CHOICES)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options is only allowed when stream is true", "stream_options")
        self._refuse("logit_bias", "logprobs")

    def _refuse(self, *names: str) -> None:
        for name in names:
            # False, 0, "", [], {} and null all mean: off.
            if getattr(self, name):
                raise InvalidParameter(f"{name} is not supported by this engine", name)


class ChatCall(StreamableCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    response_format: Any = None
    store: Any = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        super(ChatCall, self).check()  # noqa: UP008 - structs lose the cell that bare super() needs
        self._refuse("top_logprobs", "tools", "functions", "audio", "prediction", "web_search_options")
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise InvalidParameter(f"{name}: tools are not supported by this engine", name)
        if self.response_format not in (None, {"type": "text"}):
            raise InvalidParameter("response_format: only text is supported by this engine", "response_format")
        if self.modalities not in (None, ["text"]):
            raise InvalidParameter("modalities: only text is supported by this engine", "modalities")
        if not self.messages:
            raise InvalidParameter("messages must not be empty", "messages")

    def limit(self) -> int | None:
        newer = _limit("max_completion_tokens", self.max_completion_tokens)
        older = _limit("max_tokens", self.max_tokens)
        if newer is not None and older is not None and newer != older:
            raise InvalidParameter("max_tokens and max_completion_tokens differ: give one", "max_tokens")
        return older if newer is None else newer


class CompletionCall(StreamableCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: Any = None
    suffix: Any = None
    best_of: int | None = None

    def check(self) -> None:
        super(CompletionCall, self).check()  # noqa: UP008 - as above
        self._refuse("echo", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidParameter("best_of is not supported by this engine", "best_of")

    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else super(CompletionCall, self).limit()  # noqa: UP008 - 16 is OpenAI's

    def prompts(self) -> list[str | list[int]]:
        """Prompts as text or tokens; a list of numbers is one prompt. Errors: InvalidParameter."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        numbers = [item for item in self.prompt if isinstance(item, int)]
        if numbers and len(numbers) == len(self.prompt):
            return [numbers]
        several = [item for item in self.prompt if not isinstance(item, int)]
        if numbers or not several or len(several) > MAX_CHOICES:
            raise InvalidParameter(
                f"prompt: text, tokens, or 1 to {MAX_CHOICES} of either, not mixed with numbers", "prompt"
            )
        return several


class PlainCall(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /`: either prompt or messages."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None

    def check(self) -> None:
        if (self.prompt is None) is (not self.messages):
            raise InvalidParameter("give one of prompt and messages", "prompt")


Call = TypeVar("Call", ChatCall, CompletionCall, PlainCall)


class CallReader(Generic[Call]):
    """Decodes and checks the bodies of one route."""

    def __init__(self, kind: type[Call]) -> None:
        self._decoder: msgspec.json.Decoder[Call] = msgspec.json.Decoder(kind)

    def read(self, body: bytes) -> Call:
        """The call in a body. Errors: InvalidParameter, with the field if it is known."""
        try:
            call: Call = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _invalid_parameter(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidParameter(f"the body is not JSON: {error}") from error
        call.check()
        return call


def _invalid_parameter(text: str) -> InvalidParameter:
    if unknown := _UNKNOWN.search(text):
        where = _PATH.search(text)
        inside = f" in {where[1]}" if where and where[1] else ""
        return InvalidParameter(f"unknown parameter {unknown[1]!r}{inside}", (where and where[1]) or unknown[1])
    if missing := _MISSING.search(text):
        where = _PATH.search(text)
        inside = f" in {where[1]}" if where and where[1] else ""
        return InvalidParameter(f"parameter {missing[1]!r} is missing{inside}", (where and where[1]) or missing[1])
    path = _PATH.search(text)
    name = path[1] if path else None
    return InvalidParameter(f"{name}: {text}" if name else text, name)


def _limit(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise InvalidParameter(f"{name} must be at least 1, is {value}", name)
    return value


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidParameter(f"{name} must be {low:g} to {high:g}, is {value:g}", name)


Value = TypeVar("Value", int, float)


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value
