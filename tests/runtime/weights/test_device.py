"""Weights that move to a device while they arrive: one suite for every device there is, and the loader's own laws."""

from __future__ import annotations

import random
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from fleetstart.runtime.contract.errors import ChecksumMismatch, DeadlineExceeded
from fleetstart.runtime.contract.weights.manifest import DTYPE_BYTES
from fleetstart.runtime.weights import cuda
from fleetstart.runtime.weights.cuda import CudaDevice
from fleetstart.runtime.weights.device import DeviceLoad, HostDevice, MoveClock
from fleetstart.runtime.weights.host_registration import HostRegistration
from fleetstart.runtime.weights.lora import AdaptedWeights
from fleetstart.runtime.weights.transfer_plan import CopyPiece, TransferPlan
from fleetstart.runtime.weights.views import view
from fleetstart.runtime.weights.weights import Weights
from tests.runtime.segments import CHUNK, Segment
from tests.runtime.weights.test_lora import UP, A, B, base_tensors, config, filled, segment_of
from tests.runtime.weights.test_tensor_mapping import Model, as_segment, trained
from tests.runtime.workers import until

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def segment() -> Segment:
    """Six tensors, each a layer, of one and a half chunks each."""
    return Segment({f"t{number}": ("U8", (3, CHUNK // 2)) for number in range(6)}, {"config.json": b"{}"})


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def chunks_of(segment: Segment, name: str) -> range:
    entry = segment.entries[name]
    return range(entry.offset // CHUNK, (entry.offset + entry.size_bytes - 1) // CHUNK + 1)


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("load-")]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_is_there_with_its_bytes_and_shape(device: str, dtype: str) -> None:
    segment = Segment({"a": ("U8", (3,)), "t": (dtype, (70, 50)), "scalar": (dtype, ()), "none": (dtype, (0, 4))})
    if dtype == "BOOL":
        segment.data[:] = bytes(b & 1 for b in segment.data)
    weights = filled(segment).attach()
    moved = weights.to(device)
    for name in segment.entries:
        tensor = moved[name]
        assert tensor.device.type == device
        assert (tensor.dtype, tensor.shape) == (weights[name].dtype, weights[name].shape)
        assert raw(tensor) == segment.expected(name)
    assert raw(moved.get_slice("t")[3:60]) == raw(weights["t"][3:60])
    assert moved.get_slice("none")[:].shape == (0, 4)


def test_it_is_a_mapping_in_the_same_order_with_the_same_files(device: str, segment: Segment) -> None:
    weights = filled(segment).attach()
    moved = weights.to(device)
    assert list(moved) == list(weights)
    assert len(moved) == 6
    assert "t3" in moved
    assert (moved.files, moved.file("config.json")) == (weights.files, b"{}")
    assert f"on {device}" in repr(moved)
    with pytest.raises(KeyError, match="no tensor 't9'"):
        moved["t9"]


def test_a_tensor_can_be_used_when_its_own_chunks_have_moved(device: str, segment: Segment) -> None:
    moved = segment.attach(timeout_s=60).to(device)
    segment.fill(*chunks_of(segment, "t4"))  # others lag behind it
    assert raw(moved["t4"]) == segment.expected("t4")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(raw(tensor) for tensor in moved.values()))
    reader.start()
    assert not got
    for chunk in segment.chunks:
        segment.fill(chunk)
    reader.join(30)
    moved.wait()
    assert got == [segment.expected(name) for name in segment.entries]


def test_only_some_names_or_layers_move_and_only_they_are_there(device: str, segment: Segment) -> None:
    weights = segment.attach(timeout_s=60)
    moved = weights.to(device, only=["t4", 1])
    segment.fill(*chunks_of(segment, "t1"), *chunks_of(segment, "t4"))
    assert list(moved) == ["t1", "t4"]
    moved.wait()
    assert [raw(tensor) for tensor in moved.values()] == [segment.expected("t1"), segment.expected("t4")]
    with pytest.raises(KeyError, match="no tensor 't2'; it has 2"):
        moved["t2"]


def test_a_module_with_tied_weights_loads_and_computes_on_the_device(device: str) -> None:
    model = trained()
    moved = filled(as_segment(model)).attach().to(device, first=["head.weight"])
    with torch.device("meta"):
        loaded = Model().eval()
    loaded.load_state_dict(moved, strict=True, assign=True)
    assert loaded.head.weight.data_ptr() == loaded.embedding.weight.data_ptr()
    tokens = torch.arange(40)
    torch.testing.assert_close(loaded(tokens.to(device)).cpu(), model(tokens), rtol=1e-3, atol=1e-3)


def test_an_adapter_is_applied_on_the_device(device: str) -> None:
    base, adapter = filled(segment_of(base_tensors())), filled(segment_of(UP, config()))
    moved = AdaptedWeights(base.attach(), adapter.attach()).to(device, first=["layers.0.up.weight"])
    expected = base_tensors()["layers.0.up.weight"] + 2.0 * (B @ A)
    assert moved["layers.0.up.weight"].device.type == device
    torch.testing.assert_close(moved["layers.0.up.weight"].cpu(), expected)
    assert list(moved) == list(base_tensors())
    part = AdaptedWeights(base.attach(), adapter.attach()).to(device, only=["norm.weight"])
    assert (list(part), part.changed) == (["norm.weight"], frozenset())


def test_a_failed_segment_raises_its_own_error_for_what_had_not_come(device: str, segment: Segment) -> None:
    moved = segment.attach(timeout_s=60).to(device)
    segment.fill(*chunks_of(segment, "t0"))
    assert raw(moved["t0"]) == segment.expected("t0")
    raised: list[str] = []

    def read() -> None:
        try:
            moved["t5"]
        except ChecksumMismatch as error:
            raised.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    segment.control.fail("checksum_mismatch", "chunk 7: not the bytes that were published")
    reader.join(30)
    assert raised == ["chunk 7: not the bytes that were published"]
    assert raw(moved["t0"]) == segment.expected("t0")
    with pytest.raises(ChecksumMismatch, match="chunk 7"):
        moved.wait()


def test_a_chunk_that_never_comes_ends_the_loading_at_the_deadline(device: str, segment: Segment) -> None:
    segment.fill(0)
    moved = segment.attach(timeout_s=0.01).to(device)
    with pytest.raises(DeadlineExceeded, match=f"loading to {device}.* needs chunk 1: chunk 1 had not arrived"):
        moved.wait()
    with pytest.raises(DeadlineExceeded, match="t3 needs chunks 4 to 5: chunk 4 had not arrived"):
        moved["t3"]


def test_a_device_that_is_being_loaded_is_not_begun_again(device: str, segment: Segment) -> None:
    weights = segment.attach(timeout_s=60)
    one, two = weights.to(device), weights.to(device, first=["t5"])
    segment.fill(*segment.chunks)
    one.wait()
    assert one["t5"].data_ptr() == two["t5"].data_ptr()


def test_what_is_dropped_is_freed_once_its_threads_have_ended(device: str, segment: Segment) -> None:
    moved = filled(segment).attach().to(device)
    tensor = moved["t2"]
    moved.wait()
    loading = weakref.ref(moved._loading)
    del moved
    until(lambda: not loaders() and loading() is None, "the end of the loading")
    segment.close()
    assert tensor.sum() > 0


def test_names_layers_and_devices_that_there_are_not_are_refused(segment: Segment) -> None:
    weights = segment.attach()
    with pytest.raises(KeyError, match="no tensor 't7'"):
        weights.to("cpu", first=["t7"])
    with pytest.raises(KeyError, match="no tensor of layer 9"):
        weights.to("cpu", only=[9])
    with pytest.raises(ValueError, match="cpu or cuda, not to meta"):
        weights.to("meta")


def test_on_a_cpu_nothing_is_copied(segment: Segment) -> None:
    weights = filled(segment).attach()
    weights.map_ahead()
    moved = weights.to("cpu")
    assert all(moved[name].data_ptr() == weights[name].data_ptr() for name in weights)
    assert moved._loading is weights._mapped  # the pages are mapped once


class Recorded(HostDevice):
    """The host's memory, and in which order its pieces moved."""

    def __init__(self, weights: Weights, lanes: int = 1) -> None:
        super().__init__(weights.region, CHUNK)
        self.stream_count = lanes
        self.pieces: list[CopyPiece] = []
        self.gate = threading.Event()

    def move(self, piece: CopyPiece) -> None:
        self.pieces.append(piece)
        self.gate.wait(30)
        super().move(piece)


def test_a_module_is_loaded_into_with_its_computed_buffers_on_the_device(device: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(4, 4)
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    weights = filled(Segment({"line.weight": ("F32", (4, 4)), "line.bias": ("F32", (4,))})).attach().to(device)
    with torch.device("meta"):
        model = Model()
    assert weights.load_into(model).get_buffer("angles").tolist() == [0, 1, 2, 3]
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device}
    assert weights.numpy()["line.bias"].tobytes() == raw(weights["line.bias"])


def test_what_is_waited_for_moves_next(segment: Segment) -> None:
    weights = filled(segment).attach()
    device = Recorded(weights)
    transfer = TransferPlan(segment.chunks, first=chunks_of(segment, "t3"))
    loading = DeviceLoad(transfer, weights.chunk_waiter, device, chunk_bytes=16 << 20)  # a chunk a piece
    loading.begin()
    until(lambda: device.pieces, "the first piece")
    reader = threading.Thread(target=lambda: loading.wait(chunks_of(segment, "t5")))
    reader.start()
    until(lambda: transfer.front == chunks_of(segment, "t5")[0], "the reader's demand")
    device.gate.set()
    reader.join(30)
    loading.wait_for_all()
    wished = [*chunks_of(segment, "t3")[:1], *chunks_of(segment, "t5"), *chunks_of(segment, "t3")[1:]]
    assert [piece.chunk for piece in device.pieces][: len(wished)] == wished
    assert sorted(piece.chunk for piece in device.pieces) == list(segment.chunks)


def test_several_threads_move_every_chunk_once_in_whatever_order_they_come(segment: Segment) -> None:
    weights = segment.attach(timeout_s=60)
    device = Recorded(weights, lanes=3)
    device.gate.set()
    loading = DeviceLoad(TransferPlan(segment.chunks), weights.chunk_waiter, device, CHUNK).begin()
    order = list(segment.chunks)
    random.Random(4).shuffle(order)
    for chunk in order:
        segment.fill(chunk)
    loading.wait_for_all()
    assert sorted(chunk for piece in device.pieces for chunk in piece.chunks) == list(segment.chunks)
    until(lambda: not loaders(), "the threads' end")


def test_a_device_that_fails_tells_every_reader_why(segment: Segment) -> None:
    class Broken(HostDevice):
        def move(self, piece: CopyPiece) -> None:
            raise OSError("no memory for the pages of this device")

    weights = filled(segment).attach()
    broken: Any = Broken(weights.region, CHUNK)
    loading = DeviceLoad(TransferPlan(segment.chunks), weights.chunk_waiter, broken, CHUNK).begin()
    for wait in (loading.wait_for_all, lambda: loading.wait(range(1))):
        with pytest.raises(OSError, match="no memory for the pages"):
            wait()


@pytest.mark.gpu
@NO_CUDA
def test_on_cuda_there_is_one_allocation_of_the_chunks_that_move(segment: Segment) -> None:
    before = torch.cuda.memory_allocated()
    moved = filled(segment).attach().to("cuda", only=["t4"])
    tensor = moved["t4"]
    size_bytes = len(chunks_of(segment, "t4")) * CHUNK
    assert torch.cuda.memory_allocated() - before == size_bytes
    del moved
    until(lambda: not loaders(), "the threads' end")
    assert raw(tensor) == segment.expected("t4")
    del tensor
    assert torch.cuda.memory_allocated() == before


class Refusing:
    """A registration that the driver refuses after so many pieces."""

    def __init__(self, allowed: int) -> None:
        self.own, self.left, self.registered = HostRegistration(), allowed, set[int]()

    def register(self, address: int, size_bytes: int) -> bool:
        self.left -= 1
        if self.left < 0 or not self.own.register(address, size_bytes):
            return False
        self.registered.add(address)
        return True

    def unregister(self, address: int) -> None:
        self.registered.remove(address)
        self.own.unregister(address)


@pytest.mark.parametrize(("chunk_bytes", "driver"), [(1 << 20, False), (1000, True)], ids=["no driver", "half pages"])
def test_what_cannot_be_registered_is_staged(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, driver: bool) -> None:
    class Present:
        def __init__(self) -> None:
            if not driver:
                raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(cuda, "HostRegistration", Present)
    device: Any = SimpleNamespace(chunk_bytes=chunk_bytes, device=None)
    assert vars(CudaDevice)["registration"].func(device) is None


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("allowed", [0, 1, 3, 1000], ids=lambda count: f"{count} registered")
def test_on_cuda_what_the_driver_does_not_register_is_staged(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    made: list[Refusing] = []

    def registration(cuda: CudaDevice) -> Refusing:
        made.append(Refusing(allowed))
        return made[0]

    monkeypatch.setattr(CudaDevice, "registration", property(registration))
    segment = filled(Segment({f"t{number}": ("F32", (1 << 20,)) for number in range(16)}, chunk_bytes=1 << 20))
    moved = segment.attach().to("cuda")
    for name, tensor in moved.items():
        assert raw(tensor) == segment.expected(name)
    moved.wait()
    until(lambda: not loaders(), "the threads' end")
    assert not any(one.registered for one in made)


@pytest.mark.gpu
@NO_CUDA
def test_on_cuda_a_segment_is_read_in_place() -> None:
    segment = filled(Segment({"t": ("F32", (4 << 20,))}, chunk_bytes=1 << 20))
    region = segment.attach().region.reader
    registration = HostRegistration()
    torch.cuda.set_device(0)
    assert registration.works(0)
    address = view(region, "U8", 0, (region.size_bytes,)).data_ptr()
    assert registration.register(address, region.size_bytes)
    assert not registration.register(address, region.size_bytes)
    registration.unregister(address)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("registered", [True, False], ids=["in place", "staged"])
def test_on_cuda_many_pieces_pass_through_few_buffers(monkeypatch: pytest.MonkeyPatch, registered: bool) -> None:
    if not registered:
        monkeypatch.setattr(CudaDevice, "registration", None)
    segment = filled(Segment({f"t{number}": ("F32", (1 << 20,)) for number in range(64)}, chunk_bytes=1 << 20))
    moved = segment.attach().to("cuda")
    side = torch.cuda.Stream()
    for number, (name, tensor) in enumerate(moved.items()):
        with torch.cuda.stream(side) if number % 2 else torch.cuda.stream(torch.cuda.current_stream()):
            assert raw(moved[name] if number % 2 else tensor) == segment.expected(name)


def test_the_time_of_moves_leaves_out_the_waits_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = iter([100, 160, 1000, 1040])
    monkeypatch.setattr("fleetstart.runtime.weights.device.time.monotonic_ns", lambda: next(now_ns))
    clock = MoveClock()
    clock.begin()
    clock.begin()  # of another thread
    clock.end(5)
    clock.end(7)
    clock.begin()
    clock.end(1)
    assert (clock.size_bytes, clock.busy_ns) == (13, 100)


def test_a_real_load_is_measured_with_its_bytes(device: str, segment: Segment) -> None:
    weights = filled(segment).attach()
    weights.to(device).wait()
    loaded = weights.loaded
    assert loaded.size_bytes == 9 * CHUNK  # six tensors of one and a half; the file stays in host memory
    assert loaded.busy_ns > 0
