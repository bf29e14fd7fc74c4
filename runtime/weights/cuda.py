"""Weights on a CUDA device: one allocation, copies out of registered pages or by staging buffers, two priorities.

Each thread registers a piece of the segment with the driver, for reading alone, and lets the device copy it from where
it lies, while it registers the next one. That pins the pages of a mapping of its own, which is shared and read-only;
those of a private one would be copied first. Registering the pages of a segment that lies on huge pages takes 34 ms a
GiB beside an H200, and a copy of them between host memories 170 (ServerlessLLM section 4.2 pins the pool itself, which
one process owns there). Where the driver does not register such memory, each thread copies a piece into its own pinned
buffer, and fills the next one while the device reads it. Urgent pieces use streams of high priority, the rest streams
of low priority, so that background loading does not delay a first token.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterable
from functools import cached_property

import torch

from fleetstart.native import Region

from ..contract.sizes import MIB
from .host_registration import HostRegistration
from .transfer_plan import PIECE_BYTES, CopyPiece, TransferPlan
from .views import size_of, torch_dtype, view

REGISTERING_STREAMS = 2
"""The driver registers for one thread at a time; the other one starts copies meanwhile."""
REGISTERED_BYTES = 64 * MIB
"""Registered at a time: each call takes some 0.4 ms beside what its pages take."""
STAGING_STREAMS = 8
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
        self._transfer = transfer
        streams, self.piece_bytes = STAGING_STREAMS, PIECE_BYTES
        if self.registration is not None:
            streams, self.piece_bytes = REGISTERING_STREAMS, REGISTERED_BYTES
        self.stream_count = max(1, min(streams, len(os.sched_getaffinity(0)), transfer.slot_count))
        self.memory = torch.empty(transfer.slot_count * chunk_bytes, dtype=torch.uint8, device=device)
        # The allocator may return memory that this stream is still reading.
        self.allocated = torch.cuda.current_stream(device).record_event()

    @cached_property
    def registration(self) -> HostRegistration | None:
        """None where the segment has to be copied into pinned buffers."""
        if self.chunk_bytes % mmap.PAGESIZE:
            return None
        try:
            registration = HostRegistration()
        except OSError:
            return None
        torch.cuda.set_device(self.device)
        return registration if registration.works(torch.cuda.current_device()) else None

    def stream(self) -> RegisteringStream | StagingStream:
        torch.cuda.set_device(self.device)  # of this thread
        if self.registration is not None:
            return RegisteringStream(self, self.registration)
        return StagingStream(self)

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


class _Streams:
    """The two streams of one thread."""

    def __init__(self, cuda: CudaDevice) -> None:
        self._cuda = cuda
        self._streams = {True: _stream(cuda.device, _HIGH), False: _stream(cuda.device, _LOW)}
        for stream in self._streams.values():
            stream.wait_event(cuda.allocated)

    def send(self, piece: CopyPiece, source: torch.Tensor) -> torch.cuda.Event:
        """Starts the copy of pinned bytes to the piece's slots."""
        begin = piece.slot * self._cuda.chunk_bytes
        stream = self._streams[piece.urgent]
        with torch.cuda.stream(stream):
            self._cuda.memory[begin : begin + source.numel()].copy_(source, non_blocking=True)
        copy: torch.cuda.Event = stream.record_event()
        return copy

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


class RegisteringStream:
    """Copies out of the segment's own pages. What the driver refuses to register goes by staging buffers."""

    def __init__(self, cuda: CudaDevice, registration: HostRegistration) -> None:
        self._cuda = cuda
        self._registration = registration
        self._reader = cuda.region.reader
        self._streams = _Streams(cuda)
        self._registered: list[int] = []
        self._staging: StagingStream | None = None

    def move(self, piece: CopyPiece) -> torch.cuda.Event:
        source, size_bytes = _bytes_of(self._reader, piece, self._cuda.chunk_bytes)
        if self._staging is None and self._registration.register(source.data_ptr(), size_bytes):
            self._registered.append(source.data_ptr())
            return self._streams.send(piece, source)
        self._staging = self._staging or StagingStream(self._cuda)
        copies = map(self._staging.move, piece.parts(max(1, PIECE_BYTES // self._cuda.chunk_bytes)))
        return deque(copies, maxlen=1)[0]  # of one stream: the last one is complete after the others

    def close(self) -> None:
        self._streams.wait()
        if self._staging is not None:
            self._staging.close()

    def release(self) -> None:
        for address in self._registered:
            self._registration.unregister(address)
        self._registered.clear()


class StagingStream:
    """Staging buffers of one thread, used in turn, and its streams."""

    def __init__(self, cuda: CudaDevice) -> None:
        self._cuda = cuda
        self._streams = _Streams(cuda)
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def move(self, piece: CopyPiece) -> torch.cuda.Event:
        cuda, buffer = self._cuda, self._buffer()
        source, size_bytes = _bytes_of(cuda.region, piece, cuda.chunk_bytes)
        cuda.region.populate(piece.chunk * cuda.chunk_bytes, size_bytes)
        # Not Tensor.copy_: its thread pool would compete with the other copy threads for cores.
        ctypes.memmove(buffer.data_ptr(), source.data_ptr(), size_bytes)
        copy = self._streams.send(piece, buffer[:size_bytes])
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
        self._streams.wait()

    def release(self) -> None:
        pass


def _bytes_of(region: Region, piece: CopyPiece, chunk_bytes: int) -> tuple[torch.Tensor, int]:
    """The piece's bytes in host memory, and how many they are."""
    size_bytes = piece.count * chunk_bytes
    return view(region, "U8", piece.chunk * chunk_bytes, (size_bytes,)), size_bytes


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
