"""Plan of a KV cache copy: the keys and values that are still to be copied to a worker that takes over requests.

A token's key and value never change, so they are copied while the pipeline runs, and newer ones in the next round; the
last round, during which no step runs, is a few tokens (ServerlessLLM section 5 does the same with tokens). A block that
moved to another sequence is copied again. Pure: sequences in, spans out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PIECE_TOKENS = 64
"""Tokens a request: a long answer would delay the pipeline's own frames on a slow link."""


@dataclass(frozen=True, slots=True)
class ComputedSequence:
    """A running sequence with keys and values of tokens `[0, computed)` in the blocks of its table."""

    id: int
    table: tuple[int, ...]
    computed: int
    tokens: tuple[int, ...] = ()
    """At least the computed ones."""
    admission: int = 0
    """Number of its present admission: a sequence that lost its blocks and comes back may get some of them again, which
    others have written to meanwhile."""


@dataclass(frozen=True, slots=True)
class KvSpan:
    """Tokens `[begin, end)` of one sequence to copy."""

    id: int
    table: tuple[int, ...]
    begin: int
    end: int
    admission: int = 0
    """That of the sequence whose table this is."""


class KvCopyPlan:
    """Copied part of each block: its sequence, the admission of that, and the number of tokens from the beginning.

    A span is read while the engine goes on. If its sequence loses its blocks meanwhile, the bytes may be of another
    sequence: they stand under an admission that has ended, and whoever has the block next is copied anew.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._have: dict[int, tuple[int, int, int, int]] = {}
        """Block → sequence, its admission, place in its table, tokens."""

    def missing(self, sequences: Iterable[ComputedSequence]) -> list[KvSpan]:
        """Spans to copy, of at most PIECE_TOKENS each."""
        spans: list[KvSpan] = []
        for held in sequences:
            begin = self._copied(held)
            while begin < held.computed:
                end = min(begin + PIECE_TOKENS, held.computed)
                spans.append(KvSpan(held.id, held.table, begin, end, held.admission))
                begin = end
        return spans

    def done(self, span: KvSpan) -> None:
        """Marks a span as copied, after all earlier ones of its sequence."""
        size = self._block_tokens
        for place in range(span.begin // size, -(-span.end // size)):
            tokens = min(size, span.end - place * size)
            self._have[span.table[place]] = (span.id, span.admission, place, tokens)

    def _copied(self, held: ComputedSequence) -> int:
        """Number of copied tokens of a sequence, from its first on."""
        size = self._block_tokens
        for place in range(-(-held.computed // size)):
            id, admission, at, tokens = self._have.get(held.table[place], (-1, -1, -1, 0))
            if (id, admission, at) != (held.id, held.admission, place):
                return place * size
            if tokens < size:
                return min(held.computed, place * size + tokens)
        return held.computed
