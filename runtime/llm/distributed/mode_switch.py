"""Mode switch: for each running request of a pipeline, the sooner way to the keys and values that a whole worker needs.

They are copied from the stages that have them, or computed again from the request's tokens, by what was measured: the
pipeline's steps tell what tokens cost in processor time, and the copies before what a piece costs on the links. λScale
(section 4.4) always computes again; HydraServe (section 6.2) always copies. Either gives the same numbers, so no token
depends on the choice. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from .kv_copy import PIECE_TOKENS, ComputedSequence, KvSpan

BATCH_TOKENS = 256
"""Tokens that are computed again in one step, of one or more requests."""
SPREAD = 4.0
"""Largest measured size over the smallest, from which on a line through them says more than their mean."""


class LinearCost:
    """Cost of pieces of work: a fixed part and one in proportion to their size, by least squares over those measured.

    A piece larger than any measured costs in proportion to the largest: a line through small ones says little of it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sizes = self._seconds = self._squares = self._products = 0.0
        self._least = self._largest = 0.0

    def observe(self, size: float, seconds: float) -> None:
        """Adds a measured piece. `size` above 0."""
        self._least = min(self._least, size) if self._count else size
        self._largest = max(self._largest, size)
        self._count += 1
        self._sizes += size
        self._seconds += seconds
        self._squares += size * size
        self._products += size * seconds

    def scaled(self, factor: float) -> LinearCost:
        """The cost of the same pieces, if each takes so many times as long."""
        other = LinearCost()
        other._count, other._sizes, other._squares = self._count, self._sizes, self._squares
        other._least, other._largest = self._least, self._largest
        other._seconds, other._products = self._seconds * factor, self._products * factor
        return other

    def predict_s(self, size: float) -> float | None:
        """Predicted seconds of a piece; None before any was measured."""
        if not self._count:
            return None
        mean, mean_s = self._sizes / self._count, self._seconds / self._count
        slope = 0.0
        if self._largest >= SPREAD * self._least:
            spread = self._squares / self._count - mean * mean
            slope = max(0.0, (self._products / self._count - mean * mean_s) / spread)
        fixed = max(0.0, mean_s - slope * mean)
        within = min(size, self._largest) if slope else min(size, mean)
        return (fixed + slope * within) * max(1.0, size / (self._largest if slope else mean))


@dataclass(frozen=True, slots=True)
class SwitchChoice:
    """Choice for all requests with missing tokens."""

    copied: frozenset[int]
    """Ids of the requests whose keys and values are copied; those of the others are computed again."""
    copy_s: float
    """Predicted time of copying all of them."""
    recompute_s: float
    """Predicted time of computing all of them again."""
    chosen_s: float
    """Predicted time of the choice."""


def choose(
    missing: Mapping[int, int], copy_s: Callable[[int], float], recompute_s: Callable[[int], float]
) -> SwitchChoice:
    """Chooses by request, unless it is sooner to treat all alike. `missing`: tokens of each request; the others give
    the predicted time of one piece of so many tokens that is copied, and of one step that computes so many."""
    pieces = {id: pieces_s(tokens, PIECE_TOKENS, copy_s) for id, tokens in missing.items()}
    alone = frozenset(id for id, tokens in missing.items() if pieces[id] <= pieces_s(tokens, BATCH_TOKENS, recompute_s))

    def total_s(copied: frozenset[int]) -> float:
        computed = sum(tokens for id, tokens in missing.items() if id not in copied)
        return sum(pieces[id] for id in copied) + pieces_s(computed, BATCH_TOKENS, recompute_s)

    everything = frozenset(missing)
    totals = {copied: total_s(copied) for copied in (everything, alone, frozenset[int]())}
    best = min(totals, key=lambda copied: totals[copied])
    return SwitchChoice(best, totals[everything], totals[frozenset()], totals[best])


def pieces_s(tokens: int, most: int, piece_s: Callable[[int], float]) -> float:
    """Time of so many tokens in pieces of at most so many."""
    whole, rest = divmod(tokens, most)
    return (whole * piece_s(most) if whole else 0.0) + (piece_s(rest) if rest else 0.0)


def batches(spans: Iterable[KvSpan], most: int = BATCH_TOKENS) -> list[list[KvSpan]]:
    """Spans in batches of at most so many tokens, each of which the decoder computes in one step: a request's tokens
    after those before them, and one span of it in a batch. Each span has at most `most` tokens."""
    found: list[list[KvSpan]] = []
    rows: list[int] = []
    last: dict[int, int] = {}
    for span in merged(spans, most):
        size = span.end - span.begin
        place = next((at for at in range(last.get(span.id, -1) + 1, len(found)) if rows[at] + size <= most), len(found))
        if place == len(found):
            found.append([])
            rows.append(0)
        found[place].append(span)
        rows[place] += size
        last[span.id] = place
    return found


def merged(spans: Iterable[KvSpan], most: int) -> list[KvSpan]:
    """The same tokens in fewer spans of at most so many: those that follow one another are joined."""
    found: list[KvSpan] = []
    for span in spans:
        before = found[-1] if found else None
        if before is not None and (before.id, before.end) == (span.id, span.begin) and span.end - before.begin <= most:
            found[-1] = replace(span, begin=before.begin)
        else:
            found.append(span)
    return found


def missing_tokens(spans: Iterable[KvSpan]) -> dict[int, int]:
    """Number of missing tokens of each request."""
    found: dict[int, int] = {}
    for span in spans:
        found[span.id] = found.get(span.id, 0) + span.end - span.begin
    return found


def tokens_of(sequences: Iterable[ComputedSequence]) -> dict[int, tuple[int, ...]]:
    """Tokens of each request, from its first on."""
    return {sequence.id: sequence.tokens for sequence in sequences}
