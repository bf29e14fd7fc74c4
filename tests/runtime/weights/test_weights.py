"""Tensors over a segment that is still being filled: waited for, exact, and never there without their bytes."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fleetstart.native import ControlBlock
from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch, DeadlineExceeded
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.messages import WantChunks
from fleetstart.runtime.contract.weights.manifest import DTYPE_BYTES, chunks_of, manifest_bytes
from tests.runtime.segments import CHUNK, Segment
from tests.runtime.workers import Functions, receive, until

torch = pytest.importorskip("torch")

from fleetstart.runtime.weights.weights import Weights  # noqa: E402  (after the check that torch is there)

FOREVER_NS = 1 << 62


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.fixture
def segment() -> Segment:
    """Three tensors over five chunks, the middle one over a boundary, and a file in the last."""
    shapes = {"first": ("F32", (512,)), "middle": ("F32", (32, 64)), "last": ("F32", (1024,))}
    return Segment(shapes, {"config.json": b'{"layers": 3}'})


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_has_its_bytes_and_shape(dtype: str) -> None:
    segment = Segment({"a": ("F32", (3,)), "t": (dtype, (3, 5)), "scalar": (dtype, ()), "none": (dtype, (0, 4))})
    if dtype == "BOOL":
        segment.data[:] = bytes(b & 1 for b in segment.data)
    segment.fill(*segment.chunks)
    weights = segment.attach()
    assert tuple(weights["t"].shape) == (3, 5)
    assert tuple(weights["scalar"].shape) == ()
    assert tuple(weights["none"].shape) == (0, 4)
    assert weights["t"].dtype == weights["none"].dtype == weights["scalar"].dtype
    assert raw(weights["t"]) == segment.expected("t")


def test_names_come_in_the_segments_order_without_waiting(segment: Segment) -> None:
    weights = segment.attach()
    assert list(weights) == ["first", "middle", "last"]
    assert len(weights) == 3
    assert "middle" in weights
    assert "other" not in weights
    assert weights.files == ("config.json",)
    assert "0 of" in repr(weights)


def test_an_unknown_name_suggests_the_nearest(segment: Segment) -> None:
    with pytest.raises(KeyError, match="no tensor 'midle'; it has 3, the nearest: 'middle'"):
        segment.attach()["midle"]
    with pytest.raises(KeyError, match=r"no file 'confg.json'.*'config.json'"):
        segment.attach().file("confg.json")


def test_a_tensor_waits_for_its_own_chunks_alone(segment: Segment) -> None:
    segment.fill(0)
    weights = segment.attach()
    assert raw(weights["first"]) == segment.expected("first")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(raw(weights["middle"])))
    reader.start()
    assert not got
    assert segment.chunks[-1] > 1
    segment.fill(*segment.chunks[1:-1])
    reader.join(30)
    assert got == [segment.expected("middle")]


@pytest.mark.slow
def test_tensors_are_views_that_outlive_the_mapping(segment: Segment) -> None:
    segment.fill(*segment.chunks)
    weights = segment.attach()
    one, two, part = weights["middle"], weights["middle"], weights.get_slice("middle")[1:2]
    assert one.data_ptr() == two.data_ptr()
    expected = segment.expected("middle")
    file = weights.file_view("config.json")
    del weights, two
    segment.close()
    gc.collect()
    assert raw(one) == expected
    assert raw(part) == expected[256:512]
    assert bytes(file) == b'{"layers": 3}'


def test_a_write_stays_with_the_writer(segment: Segment) -> None:
    segment.fill(*segment.chunks)
    mine, other = segment.attach(), segment.attach()
    mine["first"].zero_()
    assert raw(other["first"]) == segment.expected("first")


def test_a_module_loads_its_state_from_it(segment: Segment) -> None:
    segment.fill(*segment.chunks)
    with torch.device("meta"):
        module = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.empty(e.shape)) for name, e in segment.entries.items()}
        )
    weights = segment.attach()
    module.load_state_dict(weights, assign=True)
    assert raw(module["middle"].detach()) == segment.expected("middle")
    assert module["middle"].data_ptr() == weights["middle"].data_ptr()


def test_a_file_comes_whole(segment: Segment) -> None:
    weights = segment.attach()
    segment.fill(*segment.chunks)
    assert weights.file("config.json") == b'{"layers": 3}'
    weights.wait()


def slab_inodes(segment: Segment) -> set[str]:
    return {str(os.fstat(fd).st_ino) for fd in segment.region.fds}


def mapped_bytes(segment: Segment) -> int:
    """Of this process's private mapping of the segment, the part that has its pages."""
    inodes, resident, inside = slab_inodes(segment), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            inside = fields[4] in inodes and "p" in fields[1]
        elif inside and fields[0] == "Rss:":
            resident += int(fields[1]) * 1024
    return resident


def test_chunks_are_mapped_as_they_come(segment: Segment) -> None:
    segment.fill(0, 1)
    weights = segment.attach()
    weights.map_ahead()
    until(lambda: mapped_bytes(segment) == 2 * CHUNK, "two chunks")
    segment.fill(*segment.chunks)
    until(lambda: mapped_bytes(segment) == segment.region.size_bytes, "all chunks")
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "load-cpu"], "the thread's end")


def test_mapping_ahead_ends_with_a_failed_segment(segment: Segment) -> None:
    weights = segment.attach()
    weights.map_ahead()
    segment.control.fail("store_error", "gone")
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "load-cpu"], "the thread's end")


def test_a_failed_segment_wakes_its_readers_with_its_own_error(segment: Segment) -> None:
    weights = segment.attach()
    raised: list[BaseException] = []

    def read() -> None:
        try:
            weights["last"]
        except ChecksumMismatch as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    segment.control.fail("checksum_mismatch", "chunk 2 of the test: not the bytes that were published")
    reader.join(30)
    assert "chunk 2" in str(raised[0])


def test_a_chunk_that_never_comes_is_waited_for_until_the_deadline(segment: Segment) -> None:
    segment.fill(0)
    weights = segment.attach(timeout_s=0.01)
    with pytest.raises(DeadlineExceeded, match=r"last needs chunks 2 to 3: chunk 2 had not .* 1 of 4 chunks"):
        weights["last"]
    assert raw(weights["first"]) == segment.expected("first")


def test_memory_that_does_not_fit_its_manifest_is_refused(segment: Segment) -> None:
    with pytest.raises(CheckpointInvalid, match="8192 bytes for a region of 16384"):
        Weights.attach(os.dup(segment.control.fd), [os.dup(segment.region.fds[0])], deadline_ns=FOREVER_NS)
    shorter = Segment({"one": ("U8", (1,))})
    control = ControlBlock.create("test", 4, manifest_bytes(shorter.manifest), 1)
    with pytest.raises(CheckpointInvalid, match="has 1 chunks, the segment has 4"):
        Weights.attach(os.dup(control.fd), [os.dup(fd) for fd in segment.region.fds], deadline_ns=FOREVER_NS)


SUM = """
    import torch
    class f:
        def load(self, weights):
            print("loading")
            self.weights = weights
            self.sums = {}
            for name, tensor in weights.items():
                self.sums[name] = tensor.view(torch.uint8).sum().item()
                print(name, "came")
        def __call__(self):
            return self.sums
"""


@pytest.fixture
def settings(segment: Segment) -> dict[str, Any]:
    return {
        "profile": "torch",
        "weights": CheckpointId("0" * 64),
        "segment": segment.fds,
    }


def test_a_worker_loads_while_chunks_arrive(
    torch_functions: Functions, segment: Segment, settings: dict[str, Any]
) -> None:
    worker = torch_functions.assigned(SUM, **settings)
    until(lambda: "loading" in worker.log(), "load()")
    segment.fill(0)
    until(lambda: "first came" in worker.log(), "the first tensor")
    assert "middle came" not in worker.log()
    segment.fill(*segment.chunks[1:])
    ready = worker.ready()
    assert {phase.name for phase in ready.timeline.phases} == {"start", "device", "import", "load"}
    assert worker.post().json() == {name: sum(segment.expected(name)) for name in segment.entries}


def test_a_worker_that_waits_out_of_order_says_for_what(
    torch_functions: Functions, segment: Segment, settings: dict[str, Any]
) -> None:
    worker = torch_functions.assigned(
        """
        class f:
            def load(self, weights):
                self.last = weights["last"].numel()
            def __call__(self):
                return self.last
        """,
        **settings,
    )
    entry = segment.entries["last"]
    chunks = chunks_of(segment.manifest, entry.offset, entry.size_bytes)

    want = receive(worker.channel)

    assert want == WantChunks(chunks[0], chunks[-1])
    segment.fill(*chunks)
    worker.ready()


FIRST = """
    import torch
    class f:
        def load(self, weights):
            with weights.to("cuda" if torch.cuda.is_available() else "cpu", first=["last"]) as on_device:
                self.rows = on_device.get_slice("middle")[4:6].tolist()
                print("rows came")
                self.last = on_device.get_tensor("last").view(torch.uint8).sum().item()
            self.config = weights.file("config.json").decode()
        def __call__(self):
            return {"rows": len(self.rows), "last": self.last, "config": self.config}
"""


def test_a_handler_reads_slices_on_its_device_before_the_rest_is_there(
    torch_functions: Functions, segment: Segment, settings: dict[str, Any]
) -> None:
    worker = torch_functions.assigned(FIRST, **settings)
    segment.fill(0)  # and with it the first tensor, and rows of the second
    until(lambda: "rows came" in worker.log(), "the rows")
    segment.fill(*segment.chunks)
    worker.ready()
    expected = {"rows": 2, "last": sum(segment.expected("last")), "config": '{"layers": 3}'}
    assert worker.post().json() == expected


def test_a_worker_whose_segment_fails_tells_the_segments_error(
    torch_functions: Functions, segment: Segment, settings: dict[str, Any]
) -> None:
    worker = torch_functions.assigned(SUM, **settings)
    segment.fill(0)
    until(lambda: "first came" in worker.log(), "the first tensor")
    segment.control.fail("store_error", "chunk 1: the store answered 500")
    error = worker.start_error()
    assert (error.code, error.message) == ("store_error", "chunk 1: the store answered 500")
    assert worker.exit_status() == exit_codes.START_FAILED


def test_a_worker_whose_chunks_never_come_gives_up(torch_functions: Functions, settings: dict[str, Any]) -> None:
    worker = torch_functions.assigned(SUM, start_timeout_s=0.2, **settings)
    assert worker.start_error().code == "deadline_exceeded"


def test_a_worker_refuses_a_segment_that_is_none(
    torch_functions: Functions, settings: dict[str, Any], tmp_path: Path
) -> None:
    with open(tmp_path / "file", "wb") as file:
        worker = torch_functions.assigned(SUM, **{**settings, "segment": (file.fileno(), file.fileno())})
    assert worker.start_error().code == "start_failed"


def test_workers_share_the_segments_pages(
    torch_functions: Functions, settings: dict[str, Any], segment: Segment
) -> None:
    segment.fill(*segment.chunks)
    for _ in range(2):
        torch_functions.ready(SUM, **settings)
    inodes = slab_inodes(segment)
    for worker in torch_functions.server.workers:
        maps = Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
        own = [line for line in maps if line.split()[4] in inodes]
        assert own
        assert {line.split()[1] for line in own} == {"rw-p", "r--s"}  # the latter is what devices read
