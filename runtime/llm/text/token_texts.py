"""Texts and bytes of single tokens, as OpenAI's `logprobs` shows them."""

from __future__ import annotations

import re

from .tokenizer import REPLACEMENT, Vocabulary

ANCHOR = "a"
"""Text before a token while it is decoded: some tokenizers drop the space before a text's first token."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_by_letter() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable characters of Latin-1 stand for themselves, others for 256 and up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _bytes_by_letter()


class TokenTexts:
    """Texts and bytes of a vocabulary's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._anchor = vocabulary.encode(ANCHOR, add_special_tokens=False)
        self._shown = len(vocabulary.decode(self._anchor, skip_special=False))
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token: int) -> str:
        """Text of a token; a replacement character for a part of a character."""
        return self._entry(token)[0]

    def raw(self, token: int) -> bytes | None:
        """Bytes of a token; None if the vocabulary does not say which they are."""
        return self._entry(token)[1]

    def _entry(self, token: int) -> tuple[str, bytes | None]:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._read(token)
        return known

    def _read(self, token: int) -> tuple[str, bytes | None]:
        text = self._vocabulary.decode([*self._anchor, token], skip_special=False)[self._shown :]
        if REPLACEMENT not in text:
            return text, text.encode()
        piece = self._vocabulary.piece(token)
        if found := _BYTE.fullmatch(piece):
            return text, bytes([int(found[1], 16)])
        if all(letter in _BYTES for letter in piece):
            return text, bytes(_BYTES[letter] for letter in piece)
        return text, None
