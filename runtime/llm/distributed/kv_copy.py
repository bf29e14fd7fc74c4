"""Which keys and values are still to be copied to a worker that takes running requests over.

Keys and values of a token never change once they are written, so they can be copied while the pipeline goes on, and
what came since is copied in the next round: the last round, in which everything stands still, is a few tokens
(ServerlessLLM section 5 does the same with tokens). A block that went from one sequence to another is copied anew.
Pure: sequences in, spans out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PIECE_TOKENS = 64
"""Asked for at once: a long answer would stand before the pipeline's own in the queue of a slow link."""


@dataclass(frozen=True, slots=True)
class ComputedSequence:
    """What a running sequence has: tokens `[0, computed)` in the blocks of its table."""

    id: int
    table: tuple[int, ...]
    computed: int


@dataclass(frozen=True, slots=True)
class KvSpan:
    """Tokens `[begin, end)` of one sequence, to be copied."""

    id: int
    table: tuple[int, ...]
    begin: int
    end: int


class KvCopyPlan:
    """What the target has: of each block, whose tokens and how many from its beginning."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._have: dict[int, tuple[int, int, int]] = {}
        """Block → sequence, place in its table, tokens."""

    def missing(self, sequences: Iterable[ComputedSequence]) -> list[KvSpan]:
        """In pieces of at most PIECE_TOKENS."""
        spans: list[KvSpan] = []
        for held in sequences:
            begin = self._copied(held)
            while begin < held.computed:
                end = min(begin + PIECE_TOKENS, held.computed)
                spans.append(KvSpan(held.id, held.table, begin, end))
                begin = end
        return spans

    def done(self, span: KvSpan) -> None:
        """The span's tokens are there, and all of its sequence before them."""
        size = self._block_tokens
        for place in range(span.begin // size, -(-span.end // size)):
            self._have[span.table[place]] = (span.id, place, min(size, span.end - place * size))

    def _copied(self, held: ComputedSequence) -> int:
        """Tokens of the sequence that are there, from its first on."""
        size = self._block_tokens
        for place in range(-(-held.computed // size)):
            owner, at, tokens = self._have.get(held.table[place], (-1, -1, 0))
            if owner != held.id or at != place:
                return place * size
            if tokens < size:
                return min(held.computed, place * size + tokens)
        return held.computed
