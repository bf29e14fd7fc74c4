"""What one step computes: rows of several sequences laid end to end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of sequence s are `starts[s] .. starts[s + 1]`; a decode is one row, a chunk of a prompt many.

    Positions within a sequence are consecutive. Row r writes its key and value at position
    `positions[r]`, block `tables[s][position // block_tokens]`, and attends to positions 0 to its own:
    those below the sequence's first row must have been written by earlier steps.
    """

    tokens: list[int]
    positions: list[int]
    starts: list[int]
    tables: list[list[int]]
    logits_rows: list[int]
    """Rows whose next-token logits are wanted."""
