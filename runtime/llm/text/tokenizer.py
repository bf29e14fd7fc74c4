"""Tokenizer, which is the `tokenizers` library over the checkpoint's tokenizer.json, and streaming detokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import tokenizers

from ...contract.errors import CheckpointInvalid

REPLACEMENT = "�"
MAX_HELD_TOKENS = 4
"""Most tokens without a text: a character has at most four bytes, and a token at least one."""
TAIL_TOKENS = 3
"""Tokens that have all bytes of an incomplete character."""


class Vocabulary(Protocol):
    """Encodes text to tokens and decodes tokens: `Tokenizer`, or `TableTokenizer` where the checkpoint has a table."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str: ...

    def piece(self, token: int) -> str:
        """Entry of a token in the vocabulary, in the tokenizer's own alphabet; empty without one."""
        ...


class Tokenizer:
    """Tokenizer over a tokenizer.json."""

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointInvalid(f"tokenizer.json is not readable: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes text. `add_special_tokens` adds those of the post-processor; a rendered chat contains its own."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special)

    def piece(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


class Detokenizer:
    """Streaming detokenizer: returns text of new tokens, without partial characters.

    Some tokenizers put a space before the first token of a text or drop it, so new tokens are decoded
    after a few shown ones and the common beginning is taken away. A token may end one character and begin the next:
    where several do so in a row, the text before the last character is returned and that one alone is held.
    """

    def __init__(self, tokenizer: Vocabulary, shown: Mapping[int, str] = MappingProxyType({})) -> None:
        """`shown`: special tokens that belong to the text."""
        self._tokenizer = tokenizer
        self._special = shown
        self._tokens: list[int] = []
        """Tokens that are decoded together; the last `_held` of them have text that was not returned."""
        self._held = 0
        self._given = 0
        """Characters of their text that were returned."""

    def feed(self, token: int) -> str:
        if token in self._special:
            text = self.flush() + self._special[token]
            self._tokens, self._held, self._given = [], 0, 0
            return text
        self._tokens.append(token)
        self._held += 1
        text = self._tokenizer.decode(self._tokens)
        if self._held == 1 and len(text) == self._given and self._is_hidden(token):
            self._tokens.pop()  # as the context of the next one it would be the beginning of a text
            self._held = 0
            return ""
        if not text.endswith(REPLACEMENT):
            return self._give(text, self._held)
        if self._held < MAX_HELD_TOKENS:
            return ""
        if not self._tokenizer.decode(self._tokens[-TAIL_TOKENS:]).endswith(REPLACEMENT):  # no character any more
            return self._give(text, TAIL_TOKENS)
        fresh = self._give(text[:-1], TAIL_TOKENS)
        self._held, self._given = 1, self._given - 1
        return fresh

    def _is_hidden(self, token: int) -> bool:
        """Checks whether a token is a special one, without a text."""
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special=False))

    def flush(self) -> str:
        """Returns the held-back bytes of an incomplete character."""
        return self._give(self._tokenizer.decode(self._tokens), self._held) if self._held else ""

    def _give(self, text: str, context: int) -> str:
        """Returns what is new in the text of the tokens, and keeps that many of them for the next one."""
        fresh = text[self._given :]
        self._tokens = self._tokens[-context:]
        self._held, self._given = 0, len(self._tokenizer.decode(self._tokens))
        return fresh
