"""Shard of a model: one rank's part of every tensor (tensor parallelism).

Heads and the width of the feed-forward are divided: q, k, v, gate and up by rows, o and down by columns, so that a
layer needs two sums over the ranks (Shoeybi et al., Megatron-LM, 2019, section 3). The vocabulary is divided by rows of
the embedding and the head. Norms, and biases that are added to a sum, are small: every rank has the norms, and the
first one adds the biases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...contract.weights.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `count`."""

    rank: int = 0
    count: int = 1

    @property
    def whole(self) -> bool:
        return self.count == 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, size: int) -> slice:
        """Its part of so many rows or columns: consecutive ones, as many as the others have or one more."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """The configuration with the heads and the width that are computed here. The vocabulary stays, as tokens are
        those of the whole model."""
        return replace(
            config,
            head_count=config.head_count // self.count,
            kv_head_count=config.kv_head_count // self.count,
            ffn_size=config.ffn_size // self.count,
        )


WHOLE = Shard()
