"""Limit of a context: what a prompt and its answer may need together."""

from __future__ import annotations

from ...contract.errors import ContextExceeded, InvalidInput


class InvalidPrompt(InvalidInput):
    """A prompt that a language model cannot continue, of whichever field of a request."""


def check_context(prompt_count: int, max_new_tokens: int, context_tokens: int) -> None:
    """Checks a request's size, all in tokens. Errors: InvalidPrompt for an empty one, ContextExceeded.

    Clients of OpenAI's API know the error by its code or by its words: LiteLLM by the first ones, LangChain by
    "prompt is too long".
    """
    if prompt_count < 1:
        raise InvalidPrompt("the prompt is empty", hint="send at least one token of text")
    needed = prompt_count + max_new_tokens
    if needed > context_tokens:
        raise ContextExceeded(
            f"This model's maximum context length is {context_tokens} tokens; the prompt is too long for "
            f"{max_new_tokens} new ones: it has {prompt_count}, together {needed}",
            hint="shorten the prompt, lower max_tokens, or deploy with larger max_context and kv_memory",
        )
