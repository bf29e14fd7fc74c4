"""The room for trees on a node's disk: within their budget, and on the disk itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RESERVE_BYTES = 1 << 30
"""Free space left on the disk whatever the budget, as the disk cache of weights leaves it."""


@dataclass(slots=True)
class ComingTree:
    """A tree whose files are being written, with the room that it was given."""

    size_bytes: int
    written_bytes: int = 0


def free_bytes(*, budget_bytes: int, used_bytes: int, disk_free_bytes: int, coming: Iterable[ComingTree]) -> int:
    """Bytes that one more tree can have; below 0 if those that come need more than there is.

    `used_bytes` of the budget include the coming trees; the disk has, of these, only what is written.
    """
    unwritten_bytes = sum(tree.size_bytes - tree.written_bytes for tree in coming)
    return min(budget_bytes - used_bytes, disk_free_bytes - unwritten_bytes - RESERVE_BYTES)
