"""KV block pool: a free list of block numbers, and the blocks of ended sequences whose prefix may come again.

Pure: it holds no memory. Blocks are handed out lowest number first, so that a lightly used pool touches
few pages of its memory (Kwon et al., SOSP 2023, for the idea of blocks). A full block can be kept under the key of
the tokens that it and all blocks before it hold (`block_key`): other sequences share it, and when none does, it stays
until its room is needed, least recently used first.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Sequence

BlockKey = bytes


def block_key(before: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of a full block's tokens after the block of key `before`, empty for the first. Wide enough that nobody finds
    two prompts of one key: a hit is not compared."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Allocates blocks of `block_tokens` tokens to sequences' block tables."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        if block_count < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {block_count} and {block_tokens}")
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._free = list(range(block_count))
        self._owners: dict[int, int] = {}
        """Number of tables that hold a block, of those that any does."""
        self._kept: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._unowned: dict[int, None] = {}
        """Kept blocks that no table holds, least recently used first."""

    @property
    def free_count(self) -> int:
        """Blocks that no table holds."""
        return len(self._free) + len(self._unowned)

    @property
    def kept_count(self) -> int:
        """Blocks that another sequence can share."""
        return len(self._kept)

    def blocks_for(self, token_count: int) -> int:
        """Number of blocks for that many tokens."""
        return -(-token_count // self.block_tokens)

    def grow(self, table: list[int], token_count: int) -> bool:
        """Extends the table to that many tokens; returns False without a change if the pool has too few blocks."""
        missing = self.blocks_for(token_count) - len(table)
        if missing > self.free_count:
            return False
        for _ in range(missing):
            block = heapq.heappop(self._free) if self._free else self._evict()
            self._owners[block] = 1
            table.append(block)
        return True

    def release(self, table: list[int]) -> None:
        """Frees every block of the table that no other table holds, and empties it."""
        for block in reversed(table):  # the end of a prefix is of no use without its beginning: it is evicted first
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            del self._owners[block]
            if block in self._keys:
                self._unowned[block] = None
            else:
                heapq.heappush(self._free, block)
        table.clear()

    def freed_by(self, tables: Sequence[list[int]]) -> set[int]:
        """Blocks that no table would hold if these were released."""
        held = Counter(block for table in tables for block in table)
        return {block for block, count in held.items() if count == self._owners[block]}

    def keep(self, block: int, key: BlockKey) -> None:
        """Keeps a full block of a table for others; does nothing if another block has these tokens."""
        if key not in self._kept and block not in self._keys:
            self._kept[key] = block
            self._keys[block] = key

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Kept blocks of the longest prefix of the keys."""
        found = []
        for key in keys:
            block = self._kept.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unowned_count(self, blocks: Sequence[int]) -> int:
        """How many of the blocks no table holds: so many fewer are free once they are shared."""
        return sum(block not in self._owners for block in blocks)

    def share(self, table: list[int], blocks: Sequence[int]) -> None:
        """Extends the table by kept blocks."""
        for block in blocks:
            self._unowned.pop(block, None)
            self._owners[block] = self._owners.get(block, 0) + 1
            table.append(block)

    def forget(self) -> None:
        """Keeps no block any more, as their keys and values are lost; tables stay."""
        for block in self._unowned:
            heapq.heappush(self._free, block)
        self._unowned.clear()
        self._kept.clear()
        self._keys.clear()

    def _evict(self) -> int:
        block = next(iter(self._unowned))
        del self._unowned[block]
        del self._kept[self._keys.pop(block)]
        return block
