"""Table of the request fields of the OpenAI-compatible routes: honoured, without effect, or refused with the reason.

The readers of bodies (`call_reader`) and the table in docs/models.md are made from it. A field that is not listed is an
unknown parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Route = Literal["chat", "completions", "responses", "plain", "embeddings"]
Status = Literal["honoured", "no effect", "refused"]
CHAT: tuple[Route, ...] = ("chat",)
COMPLETIONS: tuple[Route, ...] = ("completions",)
RESPONSES: tuple[Route, ...] = ("responses",)
CHATS: tuple[Route, ...] = ("chat", "responses")
STREAMED: tuple[Route, ...] = ("chat", "completions")
GENERATED: tuple[Route, ...] = ("chat", "completions", "plain")
TEXT: tuple[Route, ...] = ("chat", "completions", "responses", "plain")
ALL: tuple[Route, ...] = ("chat", "completions", "responses", "plain", "embeddings")
EMBEDDINGS: tuple[Route, ...] = ("embeddings",)


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


CACHED = "a worker reuses its last prompts' beginnings by itself: see `cached_tokens`"
STORED = "no answers are stored: send the earlier items again"
SAFETY = "the engine judges no content"
FIELDS: tuple[RequestField, ...] = (
    _honoured("model", ALL, "the function's name, or one of its adapters'; may be left out"),
    _honoured(
        "messages",
        (*CHAT, "plain"),
        "roles and text; parts of other kinds than `text` and `refusal` are refused, and so are "
        "roles that OpenAI's API does not have, and results of tools that no message before has called",
    ),
    _honoured("prompt", (*COMPLETIONS, "plain"), "text; in completions also tokens, or up to 16 of either"),
    _honoured(
        "max_tokens", GENERATED, "at least 1; completions: 16 unless given, others: as many as the context holds"
    ),
    _honoured("max_completion_tokens", CHAT, "the newer name of `max_tokens`"),
    _honoured("temperature", TEXT, "0 to 2"),
    _honoured("top_p", TEXT, "above 0, at most 1"),
    _honoured("top_k", GENERATED, "not in OpenAI's API; 0 and -1 keep every token"),
    _honoured("presence_penalty", GENERATED, "-2 to 2"),
    _honoured("frequency_penalty", GENERATED, "-2 to 2"),
    _honoured("logit_bias", GENERATED, "by token id, -100 to 100 each, added to the logits"),
    _honoured("seed", GENERATED, "64 bits; with it a call can be repeated token for token"),
    _honoured("stop", GENERATED, "up to 16 strings"),
    _honoured("ignore_eos", GENERATED, "not in OpenAI's API: generates until `max_tokens`, for benchmarks"),
    _honoured("n", STREAMED, "1 to 16"),
    _honoured("best_of", COMPLETIONS, "only equal to `n`"),
    _honoured("stream", ("chat", "completions", "responses"), "events, with a resume after a lost worker"),
    _honoured("stream_options", STREAMED, "`include_usage`"),
    _honoured("logprobs", STREAMED, "chat: true or false; completions: 0 to 20. Of the logits as the model gives them"),
    _honoured("top_logprobs", CHATS, "0 to 20; chat: with `logprobs`"),
    _honoured(
        "input",
        RESPONSES,
        "a text, or items: messages, calls of functions and their results; items of reasoning are skipped",
    ),
    _honoured("input", EMBEDDINGS, "a text, or up to 2,048; tokens are refused"),
    _honoured("encoding_format", EMBEDDINGS, "`float`, `base64`"),
    _honoured("dimensions", EMBEDDINGS, "only the model's own"),
    _honoured("instructions", RESPONSES, "a system message before the input"),
    _honoured("max_output_tokens", RESPONSES, "at least 1"),
    _honoured("text", RESPONSES, "`format`, as `response_format`; `verbosity` has no effect"),
    _honoured("metadata", RESPONSES, "comes back in the answer"),
    _honoured("truncation", RESPONSES, "`disabled`; with `auto` it is refused: no items are dropped"),
    _honoured("include", RESPONSES, "`message.output_text.logprobs`; `reasoning.encrypted_content` has no effect"),
    _honoured(
        "response_format",
        CHAT,
        "`text`, `json_object`, `json_schema`: only tokens that the schema allows are sampled. With `strict` a schema "
        "that cannot be followed is refused with the reason: see [JSON](#json-and-tools)",
    ),
    _honoured(
        "tools",
        CHATS,
        "functions, in the format of the chat template (Hermes and Qwen, Llama 3, Mistral, Qwen for code); a template "
        "without tools gets a system message that declares them. Calls of `strict` functions, and forced ones, follow "
        "their schemas",
    ),
    _honoured("tool_choice", CHATS, "`none`, `auto`, `required`, or a function: the last two force calls by a grammar"),
    _honoured("parallel_tool_calls", CHATS, "false: one call at most"),
    _ignored("user", ALL, SAFETY),
    _ignored("metadata", GENERATED, "no answer is stored that it could describe"),
    _ignored("store", CHATS, "no answer is stored"),
    _ignored("service_tier", ("chat", "completions", "responses"), "there is one tier"),
    _ignored("safety_identifier", CHATS, SAFETY),
    _ignored("prompt_cache_key", CHATS, CACHED),
    _ignored("prompt_cache_retention", CHATS, CACHED),
    _ignored("prompt_cache_options", CHATS, CACHED),
    _ignored("reasoning", RESPONSES, "models think as their chat template has it"),
    _ignored("max_tool_calls", RESPONSES, "it counts calls of OpenAI's own tools"),
    _ignored("context_management", RESPONSES, STORED),
    _ignored("background_options", RESPONSES, "answers are not made in the background"),
    _ignored("access_programs", RESPONSES, "the engine has no such programs"),
    _ignored("stream_options", RESPONSES, "events are not padded"),
    _ignored("reasoning_effort", CHAT, "models think as their chat template has it"),
    _ignored("verbosity", CHAT, "ask for short answers in a message"),
    _refused("functions", CHAT, "OpenAI replaced it by `tools`"),
    _refused("function_call", CHAT, "OpenAI replaced it by `tool_choice`", "none", "auto"),
    _refused("previous_response_id", RESPONSES, STORED),
    _refused("conversation", RESPONSES, STORED),
    _refused("background", RESPONSES, "send the header `Prefer: respond-async`"),
    _refused("prompt", RESPONSES, "no prompts are stored: send the instructions"),
    _refused("image", RESPONSES, "the engine reads and writes text"),
    _refused("moderation", CHATS, SAFETY),
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
