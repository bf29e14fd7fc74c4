"""Number of blocks of a multicast: the elbow of its time over the number of blocks (λScale section 4.2, figure 18).

With b blocks a multicast of L = ⌈log₂ N⌉ takes (b + L - 1) steps of M / (b·B) + o each, o being the overhead of one
block: few blocks leave links idle while the first one spreads, many cost overhead. Beyond the elbow more blocks gain
next to nothing, and make pipelines that serve meanwhile pass on more. Overhead and bandwidth are measured by transfers
of one size in several numbers of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WORTH = 1.03
"""Time at the elbow over the least time of any number of blocks."""
COUNTED_MOST = 256
"""Blocks of a first plan at most: more make plans large, and a multicast to a thousand nodes 3% shorter."""


class BlockCost(NamedTuple):
    """Measured cost of transfers between two nodes: T = bytes / rate + blocks x overhead."""

    bytes_per_s: float
    overhead_s: float


def fit_cost(size_bytes: int, measured: Sequence[tuple[int, float]]) -> BlockCost:
    """Least squares over (number of blocks, seconds) of transfers of that size. Errors: ValueError for fewer than two
    numbers of blocks."""
    count = len(measured)
    if len({blocks for blocks, _ in measured}) < 2:
        raise ValueError(f"the cost of a block follows from transfers in two numbers of blocks, not {count} in one")
    mean_blocks = sum(blocks for blocks, _ in measured) / count
    mean_s = sum(seconds for _, seconds in measured) / count
    spread = sum((blocks - mean_blocks) ** 2 for blocks, _ in measured)
    slope = sum((blocks - mean_blocks) * (seconds - mean_s) for blocks, seconds in measured) / spread
    overhead_s = max(0.0, slope)
    return BlockCost(size_bytes / max(1e-9, mean_s - overhead_s * mean_blocks), overhead_s)


def multicast_s(size_bytes: float, cost: BlockCost, nodes: int, blocks: int) -> float:
    """Time of the binomial pipeline. `nodes` with the source."""
    steps = blocks + max(0, math.ceil(math.log2(nodes)) - 1)
    return steps * (size_bytes / blocks / cost.bytes_per_s + cost.overhead_s)


def elbow(size_bytes: int, cost: BlockCost, nodes: int, chunks: int) -> int:
    """The fewest blocks with which a multicast takes at most `WORTH` of the least time. Blocks are whole chunks, all of
    one size but the last."""
    times: dict[int, float] = {}
    for size in range(max(1, -(-chunks // COUNTED_MOST)), chunks + 1):
        blocks = -(-chunks // size)
        whole_bytes = size_bytes * blocks * size / chunks  # as if the last block were as large as the others
        times[blocks] = min(times.get(blocks, math.inf), multicast_s(whole_bytes, cost, nodes, blocks))
    least_s = min(times.values())
    return min(blocks for blocks, seconds in times.items() if seconds <= least_s * WORTH)
