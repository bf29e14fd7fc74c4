"""Weights on a device: threads move chunks there as they arrive; a tensor is usable when its own chunks have moved.

A reader waits only for its tensor's chunks, and these move next. `transfer_plan` decides the order; the device defines
the move. On a CPU nothing is copied: a move maps a chunk's pages in one call instead of a thousand faults, and tensors
are views of the segment. On CUDA (`cuda`) the device reads registered pages, or a move goes through pinned buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from fleetstart.native import Region

from ..contract.weights.manifest import Manifest, TensorEntry, chunks_of
from .chunk_waiter import ChunkWaiter
from .tensor_mapping import IndexedTensors, TensorMapping
from .transfer_plan import PIECE_BYTES, CopyPiece, TransferPlan
from .views import size_of, view

if TYPE_CHECKING:
    import torch

    from .numpy_arrays import NumpyWeights

RECHECK_S = 0.05
"""Longest wait for the next chunk before a thread checks whether another one is ready or urgent."""


class CopyStream(Protocol):
    """Copies of one thread to a device."""

    def move(self, piece: CopyPiece) -> Any:
        """Starts the copy of a ready piece; returns a completion handle for `after`, None if it is complete."""

    def close(self) -> None:
        """Waits until all copies are complete."""

    def release(self) -> None:
        """Gives back what the copies needed, once the load has ended."""


class WeightDevice(Protocol):
    """Memory that tensors move to: the host's (`HostDevice`) or CUDA's (`cuda.CudaDevice`)."""

    @property
    def name(self) -> str: ...

    @property
    def stream_count(self) -> int:
        """Number of threads that move pieces."""

    @property
    def piece_bytes(self) -> int:
        """Largest piece that is moved at a time."""

    def stream(self) -> CopyStream: ...

    def after(self, copies: Iterable[Any]) -> None:
        """Orders the calling thread's further work on the device after these copies."""

    def view(self, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor whose bytes are at `offset` in the segment."""


class HostDevice:
    """The CPU. One thread is enough: mapping pages is several times faster than any source."""

    name = "cpu"
    stream_count = 1
    piece_bytes = PIECE_BYTES

    def __init__(self, region: Region, chunk_bytes: int) -> None:
        self._region = region
        self._chunk_bytes = chunk_bytes

    def stream(self) -> HostDevice:
        return self

    def move(self, piece: CopyPiece) -> None:
        self._region.populate(piece.chunk * self._chunk_bytes, piece.count * self._chunk_bytes)

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass

    def after(self, copies: Iterable[Any]) -> None:
        pass

    def view(self, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return view(self._region, dtype, offset, shape)


class MoveClock:
    """The bytes of a load, and the time with at least one move in progress: waits for chunks are left out.

    Copies to a GPU are asynchronous; a thread's wait for its last ones, when it closes its stream, is a move too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since_ns = 0
        self.size_bytes = 0
        self.busy_ns = 0

    def begin(self) -> None:
        with self._lock:
            if not self._running:
                self._since_ns = time.monotonic_ns()
            self._running += 1

    def end(self, size_bytes: int) -> None:
        with self._lock:
            self._running -= 1
            self.size_bytes += size_bytes
            if not self._running:
                self.busy_ns += time.monotonic_ns() - self._since_ns


class DeviceLoad:
    """Load of one segment's chunks to one device, in threads; ends with the last chunk or the first error."""

    def __init__(
        self, transfer: TransferPlan, chunk_waiter: ChunkWaiter, device: WeightDevice, chunk_bytes: int
    ) -> None:
        self.device = device
        self._transfer = transfer
        self._chunk_waiter = chunk_waiter
        self._changed = threading.Condition()
        self._copies: dict[int, Any] = {}
        self._chunk_bytes = chunk_bytes
        self._piece_chunks = max(1, device.piece_bytes // chunk_bytes)
        self._open_streams = device.stream_count
        self._error: BaseException | None = None
        self.moves = MoveClock()

    def begin(self) -> DeviceLoad:
        """Starts the threads."""
        for _ in range(self.device.stream_count):
            threading.Thread(target=self._move, name=f"load-{self.device.name}", daemon=True).start()
        return self

    def demand(self, chunks: Iterable[int]) -> None:
        """Moves these chunks next."""
        with self._changed:
            self._transfer.demand(chunks)

    def wait(self, chunks: range) -> None:
        """Waits until the caller may use the chunks. Errors: the one that ended the load before."""
        with self._changed:
            if not all(map(self._transfer.has_moved, chunks)):
                self._transfer.demand(chunks)
            while not all(map(self._transfer.has_moved, chunks)):
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            copies = {self._copies[chunk] for chunk in chunks if chunk in self._copies}
        self.device.after(copies)

    def wait_for_all(self) -> None:
        """Waits until every copy is complete. Errors: the one that ended the load."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._open_streams)
            if self._error is not None:
                raise self._error

    def _move(self) -> None:
        stream: CopyStream | None = None
        try:
            stream = self.device.stream()
            try:
                while (piece := self._next()) is not None:
                    self.moves.begin()
                    try:
                        copy = stream.move(piece)
                    finally:
                        self.moves.end(piece.count * self._chunk_bytes)
                    with self._changed:
                        self._transfer.moved(piece)
                        if copy is not None:
                            self._copies.update(dict.fromkeys(piece.chunks, copy))
                        self._changed.notify_all()
            finally:
                self.moves.begin()
                try:
                    stream.close()
                finally:
                    self.moves.end(0)
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)
        if stream is not None:
            stream.release()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._open_streams -= 1
            if not self._open_streams and self._error is None:
                self._copies.clear()  # all complete: no later wait is needed
            self._changed.notify_all()

    def _next(self) -> CopyPiece | None:
        """The next piece; None when all are taken. Errors: the segment's own, DeadlineExceeded."""
        while True:
            with self._changed:
                piece = None if self._error else self._transfer.take(self._chunk_waiter.is_ready, self._piece_chunks)
                front = None if self._error else self._transfer.front
            if piece is not None or front is None:
                return piece
            self._chunk_waiter.wait_shortly(f"loading to {self.device.name}", front, RECHECK_S)


class WeightSource(Protocol):
    """Weights in host memory, as far as `DeviceWeights` needs them (`weights.Weights`)."""

    manifest: Manifest
    chunk_waiter: ChunkWaiter

    def entry(self, name: str) -> TensorEntry: ...

    @property
    def files(self) -> tuple[str, ...]: ...

    def file_view(self, name: str) -> memoryview: ...

    def tensor_view(self, name: str) -> memoryview: ...

    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> TensorMapping: ...


class DeviceWeights(IndexedTensors):
    """Tensors of `source` on a device; files stay in host memory."""

    def __init__(self, source: WeightSource, names: Iterable[str], loading: DeviceLoad) -> None:
        super().__init__({name: source.entry(name) for name in names})
        self.source = source
        self._loading = loading

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entry(name)
        return self._view(name, entry.dtype, entry.offset, entry.shape)

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        entry = self.entry(name)
        row_bytes = size_of(entry.dtype, entry.shape[1:])
        return self._view(name, entry.dtype, entry.offset + begin * row_bytes, (end - begin, *entry.shape[1:]))

    def _view(self, name: str, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        chunks = chunks_of(self.source.manifest, offset, size_of(dtype, shape))
        # Raises the segment's error at once: the threads may be waiting for other chunks.
        self._loading.demand(chunks)
        self.source.chunk_waiter.wait(name, chunks)
        self._loading.wait(chunks)
        return self._loading.device.view(dtype, offset, shape)

    def wait(self) -> None:
        """Waits until all tensors have moved. Errors: the one that ended the load."""
        self._loading.wait_for_all()

    def __repr__(self) -> str:
        return f"DeviceWeights({len(self)} tensors on {self._loading.device.name}, from {self.source!r})"

    @property
    def files(self) -> tuple[str, ...]:
        return self.source.files

    def file_view(self, name: str) -> memoryview:
        return self.source.file_view(name)

    def numpy(self, *, widen: bool = False) -> NumpyWeights:
        """Arrays in host memory, whatever the device."""
        from .numpy_arrays import NumpyWeights

        return NumpyWeights(self._entries, self.entry, self.source.tensor_view, widen=widen)

    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> TensorMapping:
        return self.source.to(device, first=first, only=only)
