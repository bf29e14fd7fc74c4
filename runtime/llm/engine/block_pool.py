"""KV block pool: a free list of block numbers.

Pure: it holds no memory. Blocks are handed out lowest number first, so that a lightly used pool touches
few pages of its memory (Kwon et al., SOSP 2023, for the idea of blocks).
"""

from __future__ import annotations

import heapq


class BlockPool:
    """Allocates blocks of `block_tokens` tokens to sequences' block tables."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        if block_count < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {block_count} and {block_tokens}")
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._free = list(range(block_count))
        self._owned: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    def blocks_for(self, token_count: int) -> int:
        """Number of blocks for that many tokens."""
        return -(-token_count // self.block_tokens)

    def grow(self, table: list[int], token_count: int) -> bool:
        """Extends the table to that many tokens; returns False without a change if the pool has too few blocks."""
        missing = self.blocks_for(token_count) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = heapq.heappop(self._free)
            self._owned.add(block)
            table.append(block)
        return True

    def release(self, table: list[int]) -> None:
        """Frees every block of the table and empties it."""
        for block in table:
            self._owned.remove(block)
            heapq.heappush(self._free, block)
        table.clear()
