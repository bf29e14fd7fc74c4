"""Collectives of a model's ranks: gloo between CPU devices, NCCL between GPUs.

The group is made directly, and is not torch's default group: so a process can have several, and nothing is read from
its environment. It meets in a file, and its connections are on the loopback.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional

from ..model.shard import Shard

STEP_S = 60.0
"""Time limit of a collective: far longer than any takes, so a rank that hangs counts as lost."""
LOOPBACK = "lo"
dist: Any = torch.distributed
"""Its groups and stores have no declared types."""


def open_meeting(path: str, shard: Shard) -> Any:
    """The store, in a file that the ranks share, in which they find each other."""
    return dist.FileStore(path, shard.count)


class RankGroup:
    """Collectives among the ranks of one model: a `ShardGroup`. Every rank makes the same calls in the same order."""

    def __init__(self, shard: Shard, store: Any, device: torch.device) -> None:
        """Meets the other ranks in a store of torch.distributed; blocks until all are there. Errors: RuntimeError after
        STEP_S."""
        self.shard = shard
        self.device = device
        store.set_timeout(timedelta(seconds=STEP_S))
        self._group = _nccl(shard, store) if device.type == "cuda" else _gloo(shard, store)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors. Processors add up in fp32, as their matrix products do."""
        wide = partial.contiguous() if partial.device.type == "cuda" else partial.float().contiguous()
        if wide.numel():
            self._group.allreduce([wide]).wait()
        return wide.to(partial.dtype)

    def own_rows(self, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        part = self.shard.part(vocab_size)
        elsewhere = (tokens < part.start) | (tokens >= part.stop)
        return (tokens - part.start).masked_fill(elsewhere, 0), elsewhere

    def joined(self, logits: Tensor, vocab_size: int) -> Tensor:
        rows = logits.shape[0]
        if not rows:
            return logits.new_empty(0, vocab_size)
        parts = [Shard(rank, self.shard.count).part(vocab_size) for rank in range(self.shard.count)]
        widths = [part.stop - part.start for part in parts]
        # Every rank sends as much: parts differ by one row of the vocabulary at most.
        sent = functional.pad(logits, (0, max(widths) - logits.shape[1])).contiguous()
        received = [[torch.empty_like(sent) for _ in widths]] if self.shard.first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather(received, [sent], options).wait()
        if not self.shard.first:
            return logits.new_empty(0, vocab_size)
        return torch.cat([part[:, :width] for part, width in zip(received[0], widths, strict=True)], dim=1)


def _gloo(shard: Shard, store: Any) -> Any:
    kind = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(interface=LOOPBACK)]
    options._timeout = timedelta(seconds=STEP_S)
    return kind(store, shard.rank, shard.count, options)


def _nccl(shard: Shard, store: Any) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)  # read when the group is made; data goes between the GPUs
    kind = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=STEP_S)
    return kind(store, shard.rank, shard.count, options)
