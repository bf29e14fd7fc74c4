"""CUDA graphs of decode steps: the hundreds of small kernels of a step are launched by one call.

Launched one by one they take the host longer than the device computes for a small batch. A graph has fixed shapes, so
there is one for each number of sequences and each number of blocks, both rounded up to a power of two; rows that no
sequence has write to a block that none owns. A shape is captured when it has been used a few times: a capture takes
as long as some ten steps, and would delay a first token.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.capture_gate import GATE
from ...engine.runner import Batch

logger = logging.getLogger(__name__)

USED_BEFORE = 4
"""Steps of a shape before it is captured."""
LEAST_BLOCKS = 16
_PRIORITY = -2
MOST_GRAPHS = 64
"""Shapes that are kept; steps of others are computed without a graph."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits [rows, vocab_size] of tokens [rows], positions [rows] and block tables [rows, blocks] on the device."""
Shape = tuple[int, int]
"""Rows and blocks."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step. `read`: when `host` was last copied to `inputs`, and may be written again."""

    graph: torch.cuda.CUDAGraph
    host: Tensor
    inputs: Tensor
    logits: Tensor
    read: torch.cuda.Event


class DecodeGraphs:
    """Graphs of one decoder, by shape. Not thread-safe."""

    def __init__(
        self,
        compute: Compute,
        device: torch.device,
        *,
        block_tokens: int,
        spare_block: int,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`compute` waits for nothing, and makes the same calls for the same shapes once it is `ready`. No sequence has
        `spare_block`."""
        self._compute = compute
        self._device = device
        self._block_tokens = block_tokens
        self._spare_block = spare_block
        self._ready = ready
        self._used: Counter[Shape] = Counter()
        self._graphs: dict[Shape, _Graph] = {}
        self._outputs: dict[int, Tensor] = {}
        """Logits of each number of rows, which all graphs of that many rows write."""
        self._stream = _capture_stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        self._works = True

    def logits(self, batch: Batch) -> Tensor | None:
        """Logits [rows, vocab_size] of one token a sequence, valid until the next call; None without a graph."""
        shape = shape_of(batch, self._block_tokens)
        graph = self._graphs.get(shape)
        if graph is None and batch.device_tokens is None:  # else tokens that are known would wait for the capture
            graph = self._captured(shape)
        if graph is None:
            return None
        graph.read.synchronize()
        fill(graph.host, batch, self._block_tokens, self._spare_block)
        graph.inputs.copy_(graph.host, non_blocking=True)
        if batch.device_tokens is not None:
            graph.inputs[: len(batch.device_tokens), 0].copy_(batch.device_tokens)
        graph.read.record()
        graph.graph.replay()
        return graph.logits[: len(batch.tokens)]

    def _captured(self, shape: Shape) -> _Graph | None:
        self._used[shape] += 1
        wanted = self._used[shape] > USED_BEFORE and len(self._graphs) < MOST_GRAPHS
        if not (wanted and self._works and self._ready()):
            return None
        with GATE.capturing() as allowed:
            if not allowed:
                return None
            try:
                self._graphs[shape] = self._capture(shape)
            except RuntimeError as error:  # out of memory, or an operation that cannot be captured
                self._works = False
                self._end_allocations()
                logger.warning("decode steps go on without CUDA graphs", extra={"shape": shape, "error": str(error)})
        return self._graphs.get(shape)

    def _capture(self, shape: Shape) -> _Graph:
        host = unused_rows(shape, self._spare_block).pin_memory()
        inputs = host.to(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                warm = self._compute(*split(inputs))  # libraries choose kernels and take workspace on first use
                if shape[0] not in self._outputs:
                    self._outputs[shape[0]] = torch.empty_like(warm)
                logits = self._outputs[shape[0]]
                # Other threads load weights and move keys and values meanwhile.
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    logits.copy_(self._compute(*split(inputs)))
                finally:
                    graph.capture_end()
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return _Graph(graph, host, inputs, logits, read)

    def _end_allocations(self) -> None:
        """After a capture that failed: torch leaves its allocator in it, and no cached block would be freed again."""
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # it was ended
                end(torch.cuda.current_device(), self._memory)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all decoders: libraries keep a workspace for each stream. torch hands out streams of a priority in turn,
    and no load of weights, whose copies would be captured, has this one."""
    return torch.cuda.Stream(device, priority=_PRIORITY)  # type: ignore[no-untyped-call]


def shape_of(batch: Batch, block_tokens: int) -> Shape:
    """The shape that holds a batch of one token a sequence."""
    blocks = max(batch.positions) // block_tokens + 1
    return _power_of_two(len(batch.tokens)), max(LEAST_BLOCKS, _power_of_two(blocks))


def _power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def unused_rows(shape: Shape, spare_block: int) -> Tensor:
    """Inputs [rows, 2 + blocks] of rows that no sequence has: token, position, and block table."""
    rows, blocks = shape
    inputs = torch.zeros((rows, 2 + blocks), dtype=torch.long)
    inputs[:, 2] = spare_block
    return inputs


def fill(inputs: Tensor, batch: Batch, block_tokens: int, spare_block: int) -> None:
    """Writes a batch into the first rows. What stands behind a sequence's own blocks is not read."""
    count, rows = len(batch.tokens), inputs.numpy()
    rows[:count, 0] = batch.tokens
    rows[:count, 1] = batch.positions
    rows[count:, :3] = (0, 0, spare_block)
    for row, (table, position) in enumerate(zip(batch.tables, batch.positions, strict=True)):
        own = position // block_tokens + 1
        rows[row, 2 : 2 + own] = table[:own]


def split(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and block tables, as views."""
    return inputs[:, 0], inputs[:, 1], inputs[:, 2:]
