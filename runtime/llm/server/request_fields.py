"""Table of the request fields of the OpenAI-compatible routes: honoured, without effect, or refused with the reason.

The readers of bodies (`call_reader`) and the table in docs/models.md are made from it. A field that is not listed is an
unknown parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Route = Literal["chat", "completions", "plain"]
Status = Literal["honoured", "no effect", "refused"]
CHAT: tuple[Route, ...] = ("chat",)
COMPLETIONS: tuple[Route, ...] = ("completions",)
OPENAI: tuple[Route, ...] = ("chat", "completions")
ALL: tuple[Route, ...] = ("chat", "completions", "plain")


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of the request bodies of some routes."""

    name: str
    routes: tuple[Route, ...]
    status: Status
    note: str
    """What it does or takes, why it has no effect, or why it is refused."""
    off: tuple[object, ...] = ()
    """Values of a refused field that ask for nothing, and are accepted; false, 0, null and what is empty always are."""


def _honoured(name: str, routes: tuple[Route, ...], note: str) -> RequestField:
    return RequestField(name, routes, "honoured", note)


def _ignored(name: str, routes: tuple[Route, ...], note: str) -> RequestField:
    return RequestField(name, routes, "no effect", note)


def _refused(name: str, routes: tuple[Route, ...], note: str, *off: object) -> RequestField:
    return RequestField(name, routes, "refused", note, off)


CACHED = "no prompt is kept between calls"
SAFETY = "the engine judges no content"
FIELDS: tuple[RequestField, ...] = (
    _honoured("model", ALL, "the function's name; may be left out"),
    _honoured("messages", (*CHAT, "plain"), "roles and text; parts of other kinds than `text` are refused"),
    _honoured("prompt", (*COMPLETIONS, "plain"), "text; in completions also tokens, or up to 16 of either"),
    _honoured("max_tokens", ALL, "at least 1; completions: 16 unless given, others: as many as the context holds"),
    _honoured("max_completion_tokens", CHAT, "the newer name of `max_tokens`"),
    _honoured("temperature", ALL, "0 to 2"),
    _honoured("top_p", ALL, "above 0, at most 1"),
    _honoured("top_k", ALL, "not in OpenAI's API; 0 and -1 keep every token"),
    _honoured("presence_penalty", ALL, "-2 to 2"),
    _honoured("frequency_penalty", ALL, "-2 to 2"),
    _honoured("logit_bias", ALL, "by token id, -100 to 100 each, added to the logits"),
    _honoured("seed", ALL, "64 bits; with it a call can be repeated token for token"),
    _honoured("stop", ALL, "up to 16 strings"),
    _honoured("ignore_eos", ALL, "not in OpenAI's API: generates until `max_tokens`, for benchmarks"),
    _honoured("n", OPENAI, "1 to 16"),
    _honoured("best_of", COMPLETIONS, "only equal to `n`"),
    _honoured("stream", OPENAI, "events, with a resume after a lost worker"),
    _honoured("stream_options", OPENAI, "`include_usage`"),
    _honoured("logprobs", OPENAI, "chat: true or false; completions: 0 to 20. Of the logits as the model gives them"),
    _honoured("top_logprobs", CHAT, "0 to 20, with `logprobs`"),
    _honoured(
        "response_format",
        CHAT,
        "`text`, `json_object`, `json_schema`: only tokens that the schema allows are sampled. A schema with a keyword "
        "that cannot be followed (`not`, `uniqueItems`, look-around in patterns, ...) is refused with the reason",
    ),
    _honoured(
        "tools",
        CHAT,
        "functions, in the format of the chat template (Hermes and Qwen, Llama 3, Mistral); a template without tools "
        "gets a system message that declares them. `strict` is followed where calls are forced",
    ),
    _honoured("tool_choice", CHAT, "`none`, `auto`, `required`, or a function: the last two force calls by a grammar"),
    _honoured("parallel_tool_calls", CHAT, "false: one call at most"),
    _ignored("user", ALL, SAFETY),
    _ignored("metadata", ALL, "no answer is stored that it could describe"),
    _ignored("store", CHAT, "no answer is stored"),
    _ignored("service_tier", OPENAI, "there is one tier"),
    _ignored("safety_identifier", CHAT, SAFETY),
    _ignored("prompt_cache_key", CHAT, CACHED),
    _ignored("prompt_cache_retention", CHAT, CACHED),
    _ignored("prompt_cache_options", CHAT, CACHED),
    _ignored("reasoning_effort", CHAT, "models think as their chat template has it"),
    _ignored("verbosity", CHAT, "ask for short answers in a message"),
    _refused("functions", CHAT, "OpenAI replaced it by `tools`"),
    _refused("function_call", CHAT, "OpenAI replaced it by `tool_choice`", "none", "auto"),
    _refused("moderation", CHAT, SAFETY),
    _refused("modalities", CHAT, "the engine reads and writes text", ["text"]),
    _refused("audio", CHAT, "the engine reads and writes text"),
    _refused("prediction", CHAT, "the engine does not verify predicted text"),
    _refused("web_search_options", CHAT, "the engine does not search the web"),
    _refused("echo", COMPLETIONS, "send the prompt's text to your reader yourself"),
    _refused("suffix", COMPLETIONS, "the engine writes at the end of a text, not in its middle"),
)

REFUSED_PARTS = {
    "image_url": "the engine reads text, not images",
    "input_audio": "the engine reads text, not sound",
    "file": "the engine reads text: put the file's text into a text part",
}
"""Kinds of parts of a chat message that are refused, with the reason."""


def of_route(route: Route, *statuses: Status) -> Iterator[RequestField]:
    """A route's fields with one of these statuses."""
    return (field for field in FIELDS if route in field.routes and field.status in statuses)


def markdown_table() -> str:
    """The table for the documentation, ordered by status."""
    lines = ["| field | routes | | |", "| --- | --- | --- | --- |"]
    for status in ("honoured", "no effect", "refused"):
        for field in FIELDS:
            if field.status == status:
                routes = "all" if field.routes == ALL else ", ".join(field.routes)
                lines.append(f"| `{field.name}` | {routes} | {status} | {field.note} |")
    for kind, reason in REFUSED_PARTS.items():
        lines.append(f"| message parts of type `{kind}` | chat | refused | {reason} |")
    return "\n".join(lines)
