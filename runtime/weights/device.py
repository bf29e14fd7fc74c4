"""Weights on a device: chunks move there in threads as they arrive, and each tensor can be used when its own are there.

A reader waits for its tensor's chunks alone, and what it waits for moves next. The order is `transfer`'s; what a move
is depends on the device. On a CPU nothing is copied: a move maps a chunk's pages in one call instead of a thousand
faults, and the tensors are views of the segment. On CUDA (`cuda`) a move goes through pinned memory.
"""

from __future__ import annotations

import threading
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

PATIENCE_S = 0.05
"""How long a thread waits for the next chunk before it looks whether another came, or was asked for, before it."""


class CopyStream(Protocol):
    """One thread's way to the device."""

    def move(self, piece: CopyPiece) -> Any:
        """Begins the copy of a piece that is ready; what tells a user of the device when it is complete."""

    def close(self) -> None:
        """Returns when all copies are complete."""


class WeightDevice(Protocol):
    """Memory that tensors move to. Two are real: the host's, where they lie already, and CUDA's."""

    @property
    def name(self) -> str: ...

    @property
    def stream_count(self) -> int:
        """How many threads move pieces."""

    def stream(self) -> CopyStream: ...

    def after(self, copies: Iterable[Any]) -> None:
        """What the calling thread does on the device from now on comes after these copies."""

    def view(self, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor whose bytes lie at `offset` in the segment."""


class HostDevice:
    """The CPU. One thread is enough: pages are mapped several times as fast as any source brings their bytes."""

    name = "cpu"
    stream_count = 1

    def __init__(self, region: Region, chunk_bytes: int) -> None:
        self._region = region
        self._chunk_bytes = chunk_bytes

    def stream(self) -> HostDevice:
        return self

    def move(self, piece: CopyPiece) -> None:
        self._region.populate(piece.chunk * self._chunk_bytes, piece.count * self._chunk_bytes)

    def close(self) -> None:
        pass

    def after(self, copies: Iterable[Any]) -> None:
        pass

    def view(self, dtype: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return view(self._region, dtype, offset, shape)


class DeviceLoad:
    """Chunks of one segment on their way to one device. It ends with its last chunk, or with the first error."""

    def __init__(
        self, transfer: TransferPlan, chunk_waiter: ChunkWaiter, device: WeightDevice, chunk_bytes: int
    ) -> None:
        self.device = device
        self._transfer = transfer
        self._chunk_waiter = chunk_waiter
        self._changed = threading.Condition()
        self._copies: dict[int, Any] = {}
        self._piece_chunks = max(1, PIECE_BYTES // chunk_bytes)
        self._open_streams = device.stream_count
        self._error: BaseException | None = None

    def begin(self) -> DeviceLoad:
        for _ in range(self.device.stream_count):
            threading.Thread(target=self._move, name=f"load-{self.device.name}", daemon=True).start()
        return self

    def demand(self, chunks: Iterable[int]) -> None:
        with self._changed:
            self._transfer.demand(chunks)

    def wait(self, chunks: range) -> None:
        """Returns when the caller may use them. Errors: what ended the loading before they had moved."""
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
        """Returns when every copy is complete."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._open_streams)
            if self._error is not None:
                raise self._error

    def _move(self) -> None:
        try:
            stream = self.device.stream()
            try:
                while (piece := self._next()) is not None:
                    copy = stream.move(piece)
                    with self._changed:
                        self._transfer.moved(piece)
                        if copy is not None:
                            self._copies.update(dict.fromkeys(piece.chunks, copy))
                        self._changed.notify_all()
            finally:
                stream.close()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._open_streams -= 1
            if not self._open_streams and self._error is None:
                self._copies.clear()  # complete: nobody need wait for them again
            self._changed.notify_all()

    def _next(self) -> CopyPiece | None:
        """None when there is nothing left to do. Errors: why the next chunk will not come."""
        while True:
            with self._changed:
                piece = None if self._error else self._transfer.take(self._chunk_waiter.is_ready, self._piece_chunks)
                front = None if self._error else self._transfer.front
            if piece is not None or front is None:
                return piece
            self._chunk_waiter.wait_shortly(f"loading to {self.device.name}", front, PATIENCE_S)


class WeightSource(Protocol):
    """What `DeviceWeights` needs of the weights in host memory that it moves (`weights.Weights`)."""

    manifest: Manifest
    chunk_waiter: ChunkWaiter

    def entry(self, name: str) -> TensorEntry: ...

    @property
    def files(self) -> tuple[str, ...]: ...

    def file_view(self, name: str) -> memoryview: ...

    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> TensorMapping: ...


class DeviceWeights(IndexedTensors):
    """The tensors of `source` on a device. Its files stay where they are."""

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
        # Its own error, at once: the threads that move chunks may be waiting for others.
        self._loading.demand(chunks)
        self.source.chunk_waiter.wait(name, chunks)
        self._loading.wait(chunks)
        return self._loading.device.view(dtype, offset, shape)

    def wait(self) -> None:
        """Returns when all that moves has moved, and the device has it."""
        self._loading.wait_for_all()

    def __repr__(self) -> str:
        return f"DeviceWeights({len(self)} tensors on {self._loading.device.name}, from {self.source!r})"

    @property
    def files(self) -> tuple[str, ...]:
        return self.source.files

    def file_view(self, name: str) -> memoryview:
        return self.source.file_view(name)

    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> TensorMapping:
        return self.source.to(device, first=first, only=only)
