"""Request bodies of the OpenAI-compatible routes and of `POST /`: their honoured fields.

The table of all fields is `request_fields`; `call_reader` decodes bodies by both.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...openai_api.invalid_parameter import InvalidParameter, check_limit, check_range
from ..engine.sampler import SamplingParams
from .chat_messages import ChatMessage, check_messages
from .output_format import ResponseFormat
from .tools.requests import Tool, ToolChoice, ToolUse, read_tool_use

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_LOGPROBS = 20
SEED_BITS = 64
BIAS_MAX = 100


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


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
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    """For benchmarks: generates until max_tokens."""

    def params(self, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
        """Sampling parameters with the model's defaults. Errors: InvalidParameter for a field out of range."""
        check_range("temperature", self.temperature, 0.0, 2.0)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidParameter(f"top_p must be above 0 and at most 1, is {self.top_p}", "top_p")
        check_range("top_k", self.top_k, -1, 1 << 30)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None and self.seed.bit_length() > SEED_BITS:
            raise InvalidParameter(f"seed has more than {SEED_BITS} bits", "seed")
        for token, bias in (self.logit_bias or {}).items():
            if not 0 <= token < vocab_size:
                raise InvalidParameter(f"logit_bias: token {token} is not of 0 to {vocab_size - 1}", "logit_bias")
            check_range("logit_bias", bias, -BIAS_MAX, BIAS_MAX)
        return SamplingParams(
            temperature=_given(self.temperature, defaults.temperature),
            top_k=max(_given(self.top_k, defaults.top_k), 0),  # -1 is vLLM's word for all
            top_p=_given(self.top_p, defaults.top_p),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            logit_bias=tuple((self.logit_bias or {}).items()),
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
        return check_limit("max_tokens", self.max_tokens)

    def wanted_logprobs(self) -> int | None:
        """Number of alternatives whose log probability is wanted beside each token's own; None for neither."""
        return None


class StreamableCall(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the routes that can stream."""

    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def with_usage(self) -> bool:
        """Checks whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Checks the fields. Errors: InvalidParameter for a value out of range or an unsupported feature."""
        check_range("n", self.n, 1, MAX_CHOICES)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options is only allowed when stream is true", "stream_options")


class ChatCall(StreamableCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super(ChatCall, self).check()  # noqa: UP008 - structs lose the cell that bare super() needs
        if not self.messages:
            raise InvalidParameter("messages: must not be empty", "messages")
        check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        check_messages(self.messages)
        use = self.tool_use()
        if self.ignore_eos and (self.answer_schema() is not None or (use is not None and use.constrained)):
            raise InvalidParameter("ignore_eos: an answer in a format ends where the format does", "ignore_eos")

    def limit(self) -> int | None:
        newer = check_limit("max_completion_tokens", self.max_completion_tokens)
        older = check_limit("max_tokens", self.max_tokens)
        if newer is not None and older is not None and newer != older:
            raise InvalidParameter("max_tokens and max_completion_tokens differ: give one", "max_tokens")
        return older if newer is None else newer

    def answer_schema(self) -> dict[str, Any] | bool | None:
        """Schema of the answer's JSON; None for any text. Errors: InvalidParameter."""
        return None if self.response_format is None else self.response_format.schema()

    def tool_use(self) -> ToolUse | None:
        """What the call may do with tools; None for nothing. Errors: InvalidParameter."""
        return read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionCall(StreamableCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None

    def check(self) -> None:
        super(CompletionCall, self).check()  # noqa: UP008 - as above
        check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidParameter("best_of is not supported by this engine, except equal to n", "best_of")

    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else super(CompletionCall, self).limit()  # noqa: UP008 - 16 is OpenAI's

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

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
        check_messages(self.messages or ())


Value = TypeVar("Value", int, float)


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value
