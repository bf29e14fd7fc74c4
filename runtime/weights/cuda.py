"""Weights on a CUDA device: one allocation, pinned staging buffers, streams of two priorities.

The segment itself is not pinned: it is shared by many workers and mapped privately, and pinning a private mapping would
first copy its pages. So each thread copies a piece into its own pinned buffer, and fills the next one while the device
reads it; several threads together saturate PCIe (ServerlessLLM section 4.2 pins the pool itself, which one process owns
there). Urgent pieces use streams of high priority, the rest streams of low priority, so that background loading does
not delay a first token.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable

import torch

from fleetstart.native import Region

from .transfer_plan import PIECE_BYTES, CopyPiece, TransferPlan
from .views import size_of, torch_dtype, view

COPY_STREAMS = 8
"""One core copies some 6 GB/s between host memories, and a PCIe 5 link takes 55 (measured beside an H200)."""
BUFFERS = 2
"""Buffers a thread: one is filled while the device reads the other."""
_HIGH, _LOW = -1, 0


class CudaDevice:
    """CUDA memory of one transfer: one allocation with the plan's slots, alive as long as its last view."""

    def __init__(self, device: torch.device, region: Region, transfer: TransferPlan, chunk_bytes: int) -> None:
        self.name = str(device)
        self.device = device
        self.region = region
        self.chunk_bytes = chunk_bytes
        self.stream_count = max(1, min(COPY_STREAMS, len(os.sched_getaffinity(0)), transfer.slot_count))
        self._transfer = transfer
        self.memory = torch.empty(transfer.slot_count * chunk_bytes, dtype=torch.uint8, device=device)
        # The allocator may return memory that this stream is still reading.
        self.allocated = torch.cuda.current_stream(device).record_event()

    def stream(self) -> CudaCopyStream:
        return CudaCopyStream(self)

    def after(self, copies: Iterable[torch.cuda.Event]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for copy in copies:
            stream.wait_event(copy)

    def view(self, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        size_bytes = size_of(dtype, shape)
        if size_bytes == 0:
            return torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)
        chunk, within = divmod(offset, self.chunk_bytes)
        begin = self._transfer.slot(chunk) * self.chunk_bytes + within
        return self.memory[begin : begin + size_bytes].view(torch_dtype(dtype)).view(shape)


class CudaCopyStream:
    """Staging buffers of one thread, used in turn, and its two streams."""

    def __init__(self, cuda: CudaDevice) -> None:
        torch.cuda.set_device(cuda.device)  # of this thread
        self._cuda = cuda
        self._streams = {True: _stream(cuda.device, _HIGH), False: _stream(cuda.device, _LOW)}
        for stream in self._streams.values():
            stream.wait_event(cuda.allocated)
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def move(self, piece: CopyPiece) -> torch.cuda.Event:
        cuda, buffer = self._cuda, self._buffer()
        offset, size_bytes = piece.chunk * cuda.chunk_bytes, piece.count * cuda.chunk_bytes
        cuda.region.populate(offset, size_bytes)
        source = view(cuda.region, "U8", offset, (size_bytes,))
        # Not Tensor.copy_: its thread pool would compete with the other copy threads for cores.
        ctypes.memmove(buffer.data_ptr(), source.data_ptr(), size_bytes)
        begin = piece.slot * cuda.chunk_bytes
        stream = self._streams[piece.urgent]
        with torch.cuda.stream(stream):
            cuda.memory[begin : begin + size_bytes].copy_(buffer[:size_bytes], non_blocking=True)
        copy: torch.cuda.Event = stream.record_event()
        self._sent.append((buffer, copy))
        return copy

    def _buffer(self) -> torch.Tensor:
        """A free staging buffer: new on first use, since pinning is slower than filling; then the oldest one."""
        if len(self._sent) < BUFFERS:
            size_bytes = max(PIECE_BYTES, self._cuda.chunk_bytes)
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        buffer, copy = self._sent.popleft()
        copy.synchronize()
        return buffer

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
