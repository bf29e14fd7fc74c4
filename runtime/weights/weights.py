"""Weights of a checkpoint as a mapping of tensors, zero-copy over the node's shared memory.

`weights["name"]` waits until every chunk of that tensor is verified and returns a view of it. A failed segment raises
its own error at once; a slow one raises at the worker's start deadline. Iteration is in the segment's order, in which
layers run and chunks arrive, so `model.load_state_dict(weights, assign=True)` and a plain loop follow the stream. A
further name of a tensor (tied weights) comes right after it and shares its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from fleetstart.native import ControlBlock, Region

from ..contract.errors import CheckpointInvalid
from ..contract.node.messages import DeviceLoaded
from ..contract.weights.manifest import FileEntry, Manifest, TensorEntry, chunks_of, decode_manifest
from .chunk_waiter import ChunkWaiter
from .device import DeviceLoad, DeviceWeights, HostDevice, MoveClock
from .tensor_mapping import IndexedTensors, select, unknown_name
from .transfer_plan import TransferPlan
from .views import size_of, view

if TYPE_CHECKING:
    import torch

    from .numpy_arrays import NumpyWeights


class Weights(IndexedTensors):
    """Tensors of one segment by name, as views: a write changes only this worker's copy of the page."""

    def __init__(self, manifest: Manifest, region: Region, chunk_waiter: ChunkWaiter) -> None:
        super().__init__(_in_order(manifest))
        self.manifest = manifest
        self.region = region
        self.chunk_waiter = chunk_waiter
        self._loadings: WeakValueDictionary[tuple[str, tuple[str, ...] | None], DeviceLoad] = WeakValueDictionary()
        self._mapped: DeviceLoad | None = None
        self._moves: list[tuple[str, MoveClock]] = []

    @classmethod
    def attach(
        cls,
        control_fd: int,
        data_fds: Sequence[int],
        *,
        deadline_ns: int,
        want: Callable[[range], object] = lambda chunks: None,
    ) -> Weights:
        """Attaches a segment; takes over the descriptors. `deadline_ns`: monotonic time at which waits for chunks end.

        `want` is called with chunks that a reader begins to wait for.
        Errors: CheckpointInvalid if manifest, control block and memory do not fit one another.
        """
        control = ControlBlock.attach(control_fd)
        # The node has checked the manifest, and no value in it can lead outside the region.
        manifest = decode_manifest(control.manifest)
        if len(manifest.chunks) != control.chunk_count:
            raise CheckpointInvalid(
                f"the manifest has {len(manifest.chunks)} chunks, the segment has {control.chunk_count}"
            )
        try:
            region = Region.attach(data_fds, manifest.total_bytes)
        except OSError as error:
            raise CheckpointInvalid(f"the segment's memory does not fit its manifest: {error.strerror}") from error
        return cls(manifest, region, ChunkWaiter(control, deadline_ns, want))

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entry(name)
        self._wait(name, entry.offset, entry.size_bytes)
        return view(self.region, entry.dtype, entry.offset, entry.shape)

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        entry = self.entry(name)
        row_bytes = size_of(entry.dtype, entry.shape[1:])
        offset, shape = entry.offset + begin * row_bytes, (end - begin, *entry.shape[1:])
        self._wait(name, offset, size_of(entry.dtype, shape))
        return view(self.region, entry.dtype, offset, shape)

    def __repr__(self) -> str:
        ready, chunks = self.chunk_waiter.ready_count, self.chunk_waiter.chunk_count
        return f"Weights({len(self)} tensors, {self.manifest.weight_bytes:,} bytes, {ready} of {chunks} chunks ready)"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.manifest.files)

    def file_view(self, name: str) -> memoryview:
        entry: FileEntry | None = self.manifest.files.get(name)
        if entry is None:
            raise unknown_name("file", name, self.manifest.files)
        self._wait(name, entry.offset, entry.size_bytes)
        return self.region.view(entry.offset, entry.size_bytes)

    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> DeviceWeights:
        """Starts to move tensors to a device, once a device. On a CPU they stay views of the segment."""
        import torch

        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        elif place.type not in ("cpu", "cuda"):
            raise ValueError(f"weights move to cpu or cuda, not to {place}")
        chosen = set(self) if only is None else set(select(self, only))
        names = [name for name in self if name in chosen]
        ahead = self._chunks(select(self, first))
        key = (str(place), None if only is None else tuple(names))
        loading = self._loadings.get(key)
        if loading is None:
            loading = self._loadings[key] = self._begin(place, TransferPlan(self._chunks(names), first=ahead))
        else:
            loading.demand(ahead)
        return DeviceWeights(self, names, loading)

    def numpy(self, *, widen: bool = False) -> NumpyWeights:
        from .numpy_arrays import NumpyWeights

        return NumpyWeights(self._entries, self.entry, self.tensor_view, widen=widen)

    def tensor_view(self, name: str) -> memoryview:
        """A tensor's bytes as a read-only view, once they arrived."""
        entry = self.entry(name)
        self._wait(name, entry.offset, entry.size_bytes)
        return self.region.view(entry.offset, entry.size_bytes)

    def map_ahead(self) -> None:
        """Maps chunks as they become ready, in a thread, so that the first pass over the weights has no page faults.

        One call a chunk takes a third of the time of its thousand faults, in parallel with the start. The thread ends
        with the last chunk or with the segment's failure, which readers report.
        """
        self._mapped = self._begin(None, TransferPlan(range(self.chunk_waiter.chunk_count)))
        self._loadings["cpu", None] = self._mapped

    @property
    def loaded(self) -> DeviceLoaded:
        """What has moved to devices until now; on a CPU, what was mapped there."""
        on_gpu = [moves for device, moves in self._moves if device != "cpu"]
        moves = on_gpu or [moves for _, moves in self._moves]
        return DeviceLoaded(size_bytes=sum(one.size_bytes for one in moves), busy_ns=sum(one.busy_ns for one in moves))

    def _begin(self, cuda: torch.device | None, transfer: TransferPlan) -> DeviceLoad:
        """Starts a load to CUDA or to host memory, which needs no torch."""
        chunk_bytes = self.manifest.chunk_bytes
        if cuda is None or cuda.type == "cpu":
            load = DeviceLoad(transfer, self.chunk_waiter, HostDevice(self.region, chunk_bytes), chunk_bytes)
        else:
            from .cuda import CudaDevice

            device = CudaDevice(cuda, self.region, transfer, chunk_bytes)
            load = DeviceLoad(transfer, self.chunk_waiter, device, chunk_bytes)
        self._moves.append((load.device.name, load.moves))
        return load.begin()

    def _chunks(self, names: Iterable[str]) -> list[int]:
        entries = map(self.entry, names)
        return [chunk for entry in entries for chunk in chunks_of(self.manifest, entry.offset, entry.size_bytes)]

    def wait(self) -> None:
        """Waits until every chunk is ready."""
        self._wait("the whole checkpoint", 0, self.manifest.total_bytes)

    def _wait(self, name: str, offset: int, size_bytes: int) -> None:
        if not self.chunk_waiter.complete:
            self.chunk_waiter.wait(name, chunks_of(self.manifest, offset, size_bytes))


def attach_segments(
    slabs: Sequence[int],
    descriptors: Sequence[int],
    *,
    deadline_ns: int,
    want: Callable[[range], object] = lambda chunks: None,
) -> list[Weights]:
    """Attaches the segments of the weights and of an adapter; takes over the descriptors.

    `slabs`: how many each segment has, after its control block; `want` is called for the weights alone. Errors: as of
    `Weights.attach`.
    """
    given = iter(descriptors)
    attached: list[Weights] = []
    for count in slabs:
        asked = want if not attached else lambda chunks: None
        attached.append(Weights.attach(next(given), list(islice(given, count)), deadline_ns=deadline_ns, want=asked))
    return attached


def _in_order(manifest: Manifest) -> dict[str, TensorEntry]:
    """Entries in the segment's order, which is the order of arrival; the manifest sorts them by name."""
    entries = [(entry.offset, False, name, entry) for name, entry in manifest.tensors.items()]
    for alias, name in manifest.aliases.items():
        entry = manifest.tensors[name]
        entries.append((entry.offset, True, alias, entry))
    return {name: entry for _, _, name, entry in sorted(entries, key=lambda one: one[:3])}
