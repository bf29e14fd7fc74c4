"""KV cache of a transformers model in the blocks of the engine's pool.

A model asks its cache for two things: to add a layer's new keys and values, and to return all of its sequence's. Here
they are written to and gathered from slots of one pool a layer, by the block tables of the step. So a sequence is
batched with others, preempted and cancelled without its keys and values being moved.

Sequences of different length are padded at the left, as `generate` does it: positions within a row stay consecutive, so
that sliding windows and ALiBi count as they do alone. Padding points at the row's first slot, which is written, and the
attention mask hides it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """Heads and widths of one layer's key and value of one token."""

    heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def numbers(self) -> int:
        return self.heads * self.key_width + self.value_heads * self.value_width


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """Slots of the sequences of one forward pass, each with the same number of new tokens.

    Shapes:  all [sequences, longest], padded at the left; new [sequences * queries].
    """

    all: Tensor
    new: Tensor
    queries: int

    def to(self, device: torch.device) -> GroupSlots:
        return GroupSlots(self.all.to(device), self.new.to(device), self.queries)

    @property
    def longest(self) -> int:
        return self.all.shape[1]

    @property
    def fresh(self) -> bool:
        """Checks whether all tokens are new, so that nothing has to be gathered."""
        return self.longest == self.queries


def group_slots(tables: Sequence[Sequence[int]], begins: Sequence[int], queries: int, block_tokens: int) -> GroupSlots:
    """Slots of sequences with these block tables, whose next tokens begin at these positions."""
    longest = max(begins) + queries
    rows = torch.empty(len(tables), longest, dtype=torch.long)
    for row, table, begin in zip(rows, tables, begins, strict=True):
        length = begin + queries
        blocks = torch.tensor(table, dtype=torch.long)[:, None] * block_tokens
        slots = (blocks + torch.arange(block_tokens)).view(-1)[:length]
        row[: longest - length] = slots[0]
        row[longest - length :] = slots
    return GroupSlots(rows, rows[:, longest - queries :].reshape(-1), queries)


def cache_argument(takes: Container[str]) -> str:
    """Name of the cache among a model's arguments: "cache" since transformers 5.24, "past_key_values" before."""
    return "cache" if "cache" in takes else "past_key_values"


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers' classes have no types here
    """Keys and values of one layer, of all sequences."""

    is_sliding = False  # a window is applied by the model's mask: older keys stay, because their blocks do

    def __init__(self, cache: PagedCache, shape: KeyValueShape, slots: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._cache = cache
        # Never read before written: padding points at a slot of its own row.
        self._keys = torch.empty(slots, shape.heads, shape.key_width, dtype=dtype, device=device)
        self._values = torch.empty(slots, shape.value_heads, shape.value_width, dtype=dtype, device=device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values [sequences, heads, queries, width]; returns those of the whole rows."""
        group = self._cache.group
        self._keys.index_copy_(0, group.new, key_states.transpose(1, 2).flatten(0, 1))
        self._values.index_copy_(0, group.new, value_states.transpose(1, 2).flatten(0, 1))
        if group.fresh:
            return key_states, value_states
        return self._keys[group.all].transpose(1, 2), self._values[group.all].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.group.longest, 0

    def get_seq_length(self) -> int:
        return self._cache.group.longest - self._cache.group.queries

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):  # type: ignore[misc]  # transformers' classes have no types
    """Cache of all layers; `group` says whose keys and values the next forward pass adds."""

    group: GroupSlots

    def __init__(
        self, shapes: Sequence[KeyValueShape | None], slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shapes`: one a layer; None for one that keeps nothing, because it shares another one's."""
        super().__init__(
            layers=[
                DynamicLayer() if shape is None else PagedLayer(self, shape, slots, dtype, device) for shape in shapes
            ]
        )
